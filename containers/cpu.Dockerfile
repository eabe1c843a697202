# The project on CPUs, both frameworks: docker build -f containers/cpu.Dockerfile -t gpt2-toolkit:cpu .
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends openssh-client procps && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/gpt2-toolkit
COPY pyproject.toml setup.py requirements.txt README.md run_gpt2.py ./
COPY common common
COPY gpt2_study gpt2_study
COPY torch_gpt2 torch_gpt2
COPY mindformers_gpt2 mindformers_gpt2
COPY gpt2_toolkit gpt2_toolkit
COPY tools tools
# torch for CPUs alone is a tenth of the size: --build-arg PIP_OPTIONS="--extra-index-url URL", with the address that torch's site names
ARG PIP_OPTIONS=
RUN pip install --no-cache-dir $PIP_OPTIONS "torch>=2.11,<2.14" && pip install --no-cache-dir ".[torch,fast,mindspore]"
CMD ["bash"]
