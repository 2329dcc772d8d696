# NVTX, by which Nsight Systems shows the library's spans as ranges, is headers
# only (nvtx3). They come with CUDA, or beside LibTorch with the Python package
# nvidia-nvtx-cu12. Without them the ranges are left out.
find_path(LOCKSTEP_NVTX_INCLUDE_DIR nvtx3/nvToolsExt.h
  HINTS ${TORCH_INSTALL_PREFIX}/../nvidia/nvtx/include
        /usr/local/cuda/include
  DOC "The folder of nvtx3/nvToolsExt.h")
if(LOCKSTEP_NVTX_INCLUDE_DIR)
  set(LOCKSTEP_HAS_NVTX ON)
else()
  set(LOCKSTEP_HAS_NVTX OFF)
endif()
