# Finds LibTorch, as the imported target `torch` of its own package, without
# Python: libtorch_python is never linked and Python.h never included.
find_package(Torch REQUIRED)
if(TORCH_CXX_FLAGS)
  # The wheel's dual-ABI switch; it must be the same in every object.
  add_compile_options(${TORCH_CXX_FLAGS})
endif()

# LibTorch has Gloo compiled in but does not ship Gloo's headers, which its
# ProcessGroupGloo.hpp includes. Only headers are taken, nothing is linked.
find_path(GLOO_INCLUDE_DIR gloo/context.h
          HINTS ${TORCH_INSTALL_PREFIX}/include)
if(NOT GLOO_INCLUDE_DIR)
  message(FATAL_ERROR
    "Gloo's headers were not found. Install them (Debian: libgloo-dev) or set "
    "GLOO_INCLUDE_DIR to the folder that holds gloo/context.h.")
endif()

# c10d's NCCL backend is in the CUDA half of LibTorch; its header needs NCCL's,
# which lies beside torch in a wheel and nowhere in LibTorch's archive.
set(LOCKSTEP_NCCL AUTO CACHE STRING
    "The NCCL backend: AUTO (if LibTorch has it), ON (an error if not) or OFF")
set(LOCKSTEP_HAS_NCCL OFF)
set(LOCKSTEP_NCCL_LEFT_OUT "")
if(LOCKSTEP_NCCL STREQUAL "OFF")
  set(LOCKSTEP_NCCL_LEFT_OUT "LOCKSTEP_NCCL is OFF")
elseif(NOT TARGET torch_cuda)
  set(LOCKSTEP_NCCL_LEFT_OUT "this LibTorch has no CUDA")
else()
  get_target_property(torch_cuda_definitions torch_cuda
                      INTERFACE_COMPILE_DEFINITIONS)
  find_path(NCCL_INCLUDE_DIR nccl.h
            HINTS ${TORCH_INSTALL_PREFIX}/include
                  ${TORCH_INSTALL_PREFIX}/../nvidia/nccl/include)
  if(NOT USE_C10D_NCCL IN_LIST torch_cuda_definitions)
    set(LOCKSTEP_NCCL_LEFT_OUT "this LibTorch has CUDA but no NCCL")
  elseif(NOT NCCL_INCLUDE_DIR)
    set(LOCKSTEP_NCCL_LEFT_OUT "nccl.h was not found")
    message(STATUS "Lockstep: install NCCL's headers (Debian: libnccl-dev) or "
                   "set NCCL_INCLUDE_DIR to the folder that holds nccl.h")
  else()
    set(LOCKSTEP_HAS_NCCL ON)
    message(STATUS "Lockstep: NCCL, with the header of ${NCCL_INCLUDE_DIR}")
  endif()
endif()
if(LOCKSTEP_NCCL_LEFT_OUT)
  if(LOCKSTEP_NCCL STREQUAL "ON")
    message(FATAL_ERROR "LOCKSTEP_NCCL is ON, but ${LOCKSTEP_NCCL_LEFT_OUT}")
  endif()
  message(STATUS "Lockstep: NCCL left out: ${LOCKSTEP_NCCL_LEFT_OUT}")
endif()
