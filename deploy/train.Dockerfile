# Training on GPUs. From the repository's root; of the host it wants a driver and NVIDIA's container toolkit:
#
#   docker build -f deploy/train.Dockerfile -t batchwright .
#   docker run --rm --gpus all --ipc=host batchwright doctor
#   docker run --rm --gpus all --ipc=host -v "$PWD/data:/data:ro" -v batchwright-runs:/runs batchwright \
#       run data=imagefolder:/data/flowers network=resnet18 --out /runs/flowers
#   docker run --rm --gpus all --ipc=host -v batchwright-runs:/runs batchwright run --resume --out /runs/flowers
#
# --ipc=host: workers and loader processes hand images over in shared memory, of which a container has 64 MB.
# Another PyTorch, from 2.6 on, or one for another CUDA: --build-arg PYTORCH=TAG, of the tags of pytorch/pytorch.
# Nobody has built this image yet.

ARG PYTORCH=2.6.0-cuda12.6-cudnn9-runtime
FROM pytorch/pytorch:${PYTORCH}

# compile=on: Triton builds its launchers with a C compiler, which the runtime images are without.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# Newer images have the system's own Python, which lets pip write only if it is told to.
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
