# Lets the programs and modules in CMAKE_INSTALL_PREFIX that link LibTorch find it
# where pip puts it: beside the folder of this wheel, wherever that is. The build
# has written the folder of its own LibTorch into them.
file(GLOB linked "${CMAKE_INSTALL_PREFIX}/libexec/lockstep/*"
     "${CMAKE_INSTALL_PREFIX}/lib/lockstep/*.so")
foreach(file IN LISTS linked)
  unset(folders)  # a file without an entry leaves it alone
  file(READ_ELF "${file}" RUNPATH folders CAPTURE_ERROR not_elf)
  list(FILTER folders INCLUDE REGEX "/torch/lib$")
  if(folders)
    file(RPATH_CHANGE FILE "${file}" OLD_RPATH "${folders}"
         NEW_RPATH "$ORIGIN/../../../torch/lib")
  endif()
endforeach()
