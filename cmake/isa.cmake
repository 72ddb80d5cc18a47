# Code for one instruction set, chosen at run time. The library as a whole runs on any x86-64 processor; a file may
# contain code for more in one of two ways:
#
# 1. `#pragma GCC target("avx2,fma")` after all includes, everything else in an anonymous namespace (the GEMM kernels,
#    gemm_avx2.cpp and so on): no flags, nothing to do here.
# 2. A name that ends in _v3.cpp (AVX2, FMA, BMI: -march=x86-64-v3) or _v4.cpp (AVX-512: -march=x86-64-v4): the whole
#    file is compiled so, inline functions of the headers included (std::fma becomes one instruction and loops over
#    src/numerics vectorise). The linker must not pick those copies of inline functions for the rest of the program, so
#    the object's weak functions are made local to it.
#
# moelith_add_instruction_set_sources(target sources...): adds to `target` the _v3 and _v4 files among the sources.
function(moelith_add_instruction_set_sources target)
  foreach(level IN ITEMS v3 v4)
    set(files ${ARGN})
    list(FILTER files INCLUDE REGEX "_${level}\\.cpp$")
    if(NOT files OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
      continue()
    endif()
    set(objects ${target}_${level})
    add_library(${objects} OBJECT ${files})
    target_include_directories(${objects} PRIVATE $<TARGET_PROPERTY:${target},INCLUDE_DIRECTORIES>)
    target_compile_definitions(${objects} PRIVATE $<TARGET_PROPERTY:${target},COMPILE_DEFINITIONS>)
    target_link_libraries(${objects} PRIVATE moelith_flags)
    target_compile_options(${objects} PRIVATE -march=x86-64-${level})
    set(joined ${CMAKE_CURRENT_BINARY_DIR}/${objects}.o)
    add_custom_command(
      OUTPUT ${joined}
      COMMAND sh ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/join_objects.sh ${joined} "${CMAKE_LINKER}" "${CMAKE_NM}"
        "${CMAKE_OBJCOPY}" $<TARGET_OBJECTS:${objects}>
      DEPENDS $<TARGET_OBJECTS:${objects}> ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/join_objects.sh
      COMMAND_EXPAND_LISTS VERBATIM COMMENT "Joining the objects for x86-64-${level}")
    set_source_files_properties(${joined} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
    target_sources(${target} PRIVATE ${joined})
  endforeach()
endfunction()
