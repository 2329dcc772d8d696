#!/bin/sh
# compile.sh COMPILER ARGUMENT...: compiles through ccache.
#
# A precompiled header of LibTorch has 1 GB. ccache would read it for each source
# that includes it, which takes as long as the compiler needs to load it, so its
# checksum is written beside it once.
#
# Precompiled headers need ccache's "sloppiness": their time stamps differ between
# builds although their content does not. The same holds for the plugin of
# LockstepPchTemplates.cmake, which ccache treats as a part of the compiler. In
# ccache's depend mode no source is preprocessed a second time.
set -e
export CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
export CCACHE_COMPILERCHECK=content CCACHE_DEPEND=true CCACHE_PCH_EXTSUM=true
ccache "$@"
for argument; do
  case $previous$argument in
    -o*.gch) b2sum <"$argument" >"$argument.sum" ;;
  esac
  previous=$argument
done
