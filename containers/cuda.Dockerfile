# The project on NVIDIA GPUs: docker build -f containers/cuda.Dockerfile -t gpt2-toolkit:cuda .
# The driver is the host's (NVIDIA Container Toolkit); CUDA, cuDNN and NCCL come with torch.
FROM python:3.12-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends openssh-client procps gcc g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/gpt2-toolkit
COPY pyproject.toml setup.py requirements.txt README.md run_gpt2.py ./
COPY common common
COPY gpt2_study gpt2_study
COPY torch_gpt2 torch_gpt2
COPY mindformers_gpt2 mindformers_gpt2
COPY gpt2_toolkit gpt2_toolkit
COPY tools tools
RUN pip install --no-cache-dir ".[torch,fast,deepspeed]"
CMD ["bash"]
