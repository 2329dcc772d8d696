# lockstep_options(TARGET): sets the options with which every target of this
# repository compiles.
function(lockstep_options target)
  # ccache can cache a source that uses a precompiled header only with
  # -fpch-preprocess.
  #
  # GCC collects garbage when its heap has grown to ggc-min-heapsize (in KiB; 128
  # MiB at most, if it chooses). LibTorch's precompiled header alone is larger,
  # so a source would be collected from its first line on: with 2 GiB it takes
  # 15 % less time, and 6 % more memory (1.7 GiB).
  #
  # With -O3, GCC 12 warns of overlaps in std::string where there are none (GCC's
  # bug 105651).
  set(old_gcc "$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>")
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow
    "$<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess;--param=ggc-min-heapsize=2097152>"
    "$<$<AND:$<CONFIG:Release>,${old_gcc}>:-Wno-restrict>")
  if(LOCKSTEP_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(LOCKSTEP_SANITIZE)
    target_compile_options(${target} PRIVATE
      -fsanitize=${LOCKSTEP_SANITIZE} -fno-omit-frame-pointer)
    target_link_options(${target} PRIVATE -fsanitize=${LOCKSTEP_SANITIZE})
  endif()
endfunction()

# lockstep_layer(NAME SOURCES ... DEPENDS ... LIBRARIES ...)
#
# Makes one folder under lockstep/ the library lockstep_NAME (Lockstep::NAME); a
# folder of a folder, as parallel/ddp, is lockstep_parallel_ddp. Its headers are
# reached through a folder that holds a link to this layer and nothing else, so
# that a source can include only the layers its target DEPENDS on: an include
# against the arrows of the design fails to compile.
function(lockstep_layer folder)
  cmake_parse_arguments(arg "" "" "SOURCES;DEPENDS;LIBRARIES" ${ARGN})
  string(REPLACE "/" "_" name ${folder})
  set(target lockstep_${name})
  set(scope PUBLIC)
  if(arg_SOURCES)
    add_library(${target} ${arg_SOURCES})
    lockstep_options(${target})
    target_compile_features(${target} PUBLIC cxx_std_20)
  else()
    set(scope INTERFACE)
    add_library(${target} INTERFACE)
  endif()
  add_library(Lockstep::${name} ALIAS ${target})

  set(include_dir ${CMAKE_BINARY_DIR}/layers/${name})
  cmake_path(GET folder PARENT_PATH parent)
  file(MAKE_DIRECTORY ${include_dir}/lockstep/${parent})
  file(CREATE_LINK ${PROJECT_SOURCE_DIR}/lockstep/${folder}
       ${include_dir}/lockstep/${folder} SYMBOLIC)
  target_include_directories(${target} ${scope}
    $<BUILD_INTERFACE:${include_dir}>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  foreach(layer IN LISTS arg_DEPENDS)
    string(REPLACE "/" "_" layer ${layer})
    target_link_libraries(${target} ${scope} lockstep_${layer})
  endforeach()
  target_link_libraries(${target} ${scope} ${arg_LIBRARIES})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_LAYERS ${target})
endfunction()

# lockstep_add_pch(TARGET HEADERS ... LIBRARIES ...): a precompiled header that
# targets with the same options reuse.
function(lockstep_add_pch target)
  cmake_parse_arguments(arg "" "" "HEADERS;LIBRARIES" ${ARGN})
  # If the file exists, it is left alone: writing it again would compile it
  # again.
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/torch_pch/torch_pch.cpp CONTENT "")
  add_library(${target} STATIC ${CMAKE_BINARY_DIR}/torch_pch/torch_pch.cpp)
  target_link_libraries(${target} PRIVATE ${arg_LIBRARIES})
  lockstep_options(${target})
  target_precompile_headers(${target} PRIVATE ${arg_HEADERS})
  lockstep_instantiate_in_pch(${target})
endfunction()

# One precompiled header for all sources that include LibTorch: torch/torch.h
# costs 25 s a file without it. It is built once, for the target
# ${LOCKSTEP_TORCH_PCH}; the others reuse it. A folder whose sources compile with
# other options gives it another name, and may add headers and their libraries
# with LOCKSTEP_TORCH_PCH_HEADERS and LOCKSTEP_TORCH_PCH_LIBRARIES. What inline
# functions of a target's sources use is compiled again in each of its objects, so
# sources are compiled several at a time (unity build).
set(LOCKSTEP_TORCH_PCH lockstep_torch_pch)
function(lockstep_use_torch_pch target)
  set_target_properties(${target} PROPERTIES
    UNITY_BUILD ${LOCKSTEP_UNITY_BUILD} UNITY_BUILD_BATCH_SIZE 16)
  # With a sanitizer hardly a source with LibTorch is compiled.
  if(NOT LOCKSTEP_PCH OR LOCKSTEP_SANITIZE)
    return()
  endif()
  if(NOT TARGET ${LOCKSTEP_TORCH_PCH})
    lockstep_add_pch(${LOCKSTEP_TORCH_PCH}
      HEADERS <torch/torch.h>
              <torch/csrc/distributed/c10d/Backend.hpp>
              <torch/csrc/distributed/c10d/Store.hpp>
              ${LOCKSTEP_TORCH_PCH_HEADERS}
      LIBRARIES torch ${LOCKSTEP_TORCH_PCH_LIBRARIES})
  endif()
  target_precompile_headers(${target} REUSE_FROM ${LOCKSTEP_TORCH_PCH})
endfunction()

# lockstep_compile_quickly(): for folders whose programs need not be fast. GCC
# compiles them without optimisation in less than half the time that it takes with
# -O2; what they call in the libraries is as fast as ever. Under a sanitizer they
# keep the options of the preset. If tests are built, the precompiled header has
# what most of them include, too.
macro(lockstep_compile_quickly)
  if(NOT LOCKSTEP_SANITIZE)
    add_compile_options(-O0)
  endif()
  set(LOCKSTEP_TORCH_PCH lockstep_torch_pch_quick)
  if(LOCKSTEP_BUILD_TESTS)
    find_package(GTest REQUIRED)
    set(LOCKSTEP_TORCH_PCH_HEADERS <gmock/gmock.h> <nlohmann/json.hpp>)
    set(LOCKSTEP_TORCH_PCH_LIBRARIES GTest::gmock nlohmann_json::nlohmann_json)
    # GTest::gmock gives it to the header, which fits only sources that have it.
    add_compile_definitions(GTEST_HAS_PTHREAD=1)
  endif()
endmacro()
