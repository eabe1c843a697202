# The project on Ascend NPUs (aarch64 or x86-64): docker build -f containers/cann.Dockerfile -t gpt2-toolkit:cann .
# BASE has CANN and Python; choose the one of your driver. Not built on an Ascend host so far.
ARG BASE=ascendai/cann:8.2.rc1-910-ubuntu22.04-py3.11
FROM ${BASE}
WORKDIR /opt/gpt2-toolkit
COPY pyproject.toml setup.py requirements.txt README.md run_gpt2.py ./
COPY common common
COPY gpt2_study gpt2_study
COPY torch_gpt2 torch_gpt2
COPY mindformers_gpt2 mindformers_gpt2
COPY gpt2_toolkit gpt2_toolkit
COPY tools tools
ARG EXTRAS=torch,npu,mindspore
RUN pip install --no-cache-dir ".[${EXTRAS}]"
CMD ["bash"]
