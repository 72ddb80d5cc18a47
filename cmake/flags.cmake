# Compiler flags of everything in the tree: the interface target `moelith_flags`.
#
# -ffp-contract=off: a product and a sum are never fused unless the source says std::fma, so that a file compiled for
# a newer instruction set computes the same bits as one compiled for the baseline.
#
# -fno-trapping-math -fno-math-errno: comparisons may be evaluated ahead of time, since nobody reads floating-point
# exception flags or errno. Without them GCC keeps the branches of exp, and loops over it stay scalar. No value depends on
# them.
add_library(moelith_flags INTERFACE)
target_compile_options(moelith_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX,C>:-Wall;-Wextra;-ffp-contract=off;-fno-trapping-math;-fno-math-errno>
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-psabi;-Wno-maybe-uninitialized>)
if(MOELITH_WERROR)
  target_compile_options(moelith_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX,C>:-Werror>)
endif()

if(MOELITH_SANITIZE)
  # For the whole tree, the tests' libraries included. -O1 -g1 keeps the builds cheap and the reports readable.
  add_compile_options(
    -fsanitize=${MOELITH_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g1)
  add_link_options(-fsanitize=${MOELITH_SANITIZE})
  set(CMAKE_CXX_FLAGS_RELEASE "")
  set(CMAKE_C_FLAGS_RELEASE "")
  if(MOELITH_SANITIZE MATCHES "thread")
    add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-tsan>)
  endif()
endif()
