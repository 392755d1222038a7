# The training image: every kernel is compiled here, so that no step ever falls back to a slow one.
#   docker build --build-arg ARCH="90" -t padfree .
#   docker run --gpus all --ipc=host -v "$PWD:/data" padfree torchrun --standalone --nproc-per-node 8 -m training run.toml
# Versions come from constraints-cuda.txt alone; the image's CUDA has to be the one torch was built with.
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-cudnn-devel-ubuntu24.04 AS build

# GPU architectures to compile for, without the dot: 90 Hopper, 100 Blackwell, 80 A100. One takes 3 minutes
# on 16 cores, all that causal-conv1d builds by itself half an hour.
ARG ARCH="90"
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/padfree
ENV PATH=/opt/padfree/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_CONSTRAINT=/build/constraints-cuda.txt
WORKDIR /build
COPY constraints-cuda.txt .
RUN pip install torch ninja packaging setuptools wheel numpy

# causal-conv1d's setup.py has its own list of architectures and takes no other: put ours in its place.
# The source package needs torch even to say its name, and with SKIP_CUDA_BUILD no compiler for that.
RUN CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE pip download --no-deps --no-binary :all: --no-build-isolation causal-conv1d \
    && tar xzf causal_conv1d-*.tar.gz \
    && cd causal_conv1d-*/ \
    && sed -i "s/^    # HACK: The compiler flag/    cc_flag[:] = [f for a in '${ARCH}'.split() for f in ('-gencode', f'arch=compute_{a},code=sm_{a}')]\n&/" setup.py \
    && grep -q 'cc_flag\[:\] = ' setup.py \
    && CAUSAL_CONV1D_FORCE_BUILD=TRUE pip wheel --no-deps --no-build-isolation --wheel-dir /build/wheels .

RUN pip install /build/wheels/*.whl flash-linear-attention tilelang flash-qla liger-kernel torchao
COPY pyproject.toml README.md LICENSE ./padfree/
COPY packing ./padfree/packing
COPY training ./padfree/training
RUN pip install "./padfree[train]"
# A package that does not import would make transformers bind its slow reference: fail the build instead.
RUN python -c "import causal_conv1d, fla.modules, liger_kernel, packing, tilelang, training" \
    && python -c "from importlib.metadata import version; version('flash-qla')"

FROM nvidia/cuda:${CUDA}-cudnn-devel-ubuntu24.04
# devel, since triton and tilelang compile their kernels for the first batch; they keep them in /cache.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/padfree /opt/padfree
# PYTHONSAFEPATH: a folder named datasets or training where the user happens to be shadows no package.
ENV PATH=/opt/padfree/bin:$PATH \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
    FLA_FLASH_QLA=1 \
    TRITON_CACHE_AUTOTUNING=1 \
    TRITON_CACHE_DIR=/cache/triton \
    TILELANG_CACHE_DIR=/cache/tilelang
VOLUME /cache
WORKDIR /data
