# LibTorch, as the imported target `torch` of its own package, without Python:
# libtorch_python is never linked and Python.h never included.
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
