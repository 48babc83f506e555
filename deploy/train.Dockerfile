# Training on GPUs: a file to start from. Nobody has built it yet: tests only read it. It needs NVIDIA's driver and
# container toolkit on the host. From the repository's root:
#
#   docker build -f deploy/train.Dockerfile -t batchwright .
#   docker run --rm --gpus all --ipc=host batchwright
#   docker run --rm --gpus all --ipc=host -v "$PWD/data:/data:ro" -v batchwright-runs:/runs batchwright \
#       run data=imagefolder:/data/flowers val=0.1 network=resnet18 --out /runs/flowers
#   docker run --rm --gpus all --ipc=host -v "$PWD/data:/data:ro" -v batchwright-runs:/runs batchwright \
#       run --resume --out /runs/flowers
#
# The second command is `batchwright doctor`. --ipc=host: workers and loader processes hand images over in shared
# memory, of which a container has 64 MB.
# Another PyTorch, from 2.6 on, or one for another CUDA: --build-arg PYTORCH=TAG, of the tags of pytorch/pytorch.

ARG PYTORCH=2.6.0-cuda12.6-cudnn9-runtime
FROM pytorch/pytorch:${PYTORCH}

# compile=on: Triton builds its launchers with a C compiler, which the runtime images are without. A tag whose Python is
# the system's own needs python3-dev here, too.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# Where Python is the system's own, pip writes only if it is told to.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1

COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN pip install "/source[data,delivery,tracking]" && rm -r /source

RUN useradd --uid 10001 --create-home batchwright \
    && install -d -o batchwright -m 0755 /runs
# By number, so that Kubernetes sees that it is not root (`runAsNonRoot`).
USER 10001
WORKDIR /runs
VOLUME /runs
# Decoded images are kept between runs, with the runs.
ENV XDG_CACHE_HOME=/runs/.cache

ENTRYPOINT ["batchwright"]
CMD ["doctor"]
