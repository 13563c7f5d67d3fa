# syntax=docker/dockerfile:1
# Images of the server (docs/containers.md):
#   docker build --target cpu  -t vllm:cpu .
#   docker build --target cuda -t vllm:cuda --build-arg TORCH_CUDA_ARCH_LIST=Hopper .
# A wheel is built on a system whose C library is older than that of the image that it runs in.

FROM python:3.12-slim-bookworm AS wheel-cpu
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ make \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN make wheel VENV=/opt/build VLLM_TARGET_DEVICE=cpu

FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS wheel-cuda
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ make python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
ARG TORCH_CUDA_ARCH_LIST=""
ENV TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST}
WORKDIR /src
COPY . .
RUN make wheel VENV=/opt/build VLLM_TARGET_DEVICE=cuda

# Everything that is written goes to /cache (and /tmp), so that the root can be read-only.
FROM python:3.12-slim-trixie AS server
RUN useradd --uid 10001 --home-dir /cache --create-home vllm
ENV HOME=/cache \
    HF_HOME=/cache/huggingface \
    VLLM_CACHE_ROOT=/cache/vllm \
    PYTHONUNBUFFERED=1
WORKDIR /cache
EXPOSE 8000
# The server answers /health before the model is loaded, with 503.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# Process 1 of the container: it handles SIGTERM itself.
ENTRYPOINT ["vllm", "serve"]

# xgrammar's own requirements name triton, which the CPU does not need.
FROM server AS cpu
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,from=wheel-cpu,source=/src/dist/cpu,target=/wheels \
    pip install --no-cache-dir torch==2.13.0 /wheels/*.whl \
 && pip install --no-cache-dir --no-deps 'xgrammar>=0.2.8'
USER 10001

# Triton compiles a launcher with the C compiler at its first call.
FROM server AS cuda
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch==2.13.0
RUN --mount=type=bind,from=wheel-cuda,source=/src/dist/cuda,target=/wheels \
    pip install --no-cache-dir torch==2.13.0 "$(echo /wheels/*.whl)[structured,ray]"
USER 10001
