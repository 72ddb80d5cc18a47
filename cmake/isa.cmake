# Files for one instruction set carry it at the end of their name. The callers choose among them at run time.
set(moelith_isa_flags_v3 -march=x86-64-v3)
set(moelith_isa_flags_avx2 -mavx2 -mfma -mf16c -mbmi2)
set(moelith_isa_flags_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mbmi2)
set(moelith_isa_flags_amx -mamx-tile -mamx-bf16 -mavx512bf16 ${moelith_isa_flags_avx512})

# moelith_compile_for_instruction_sets(files...): adds the flags that each file's name asks for.
function(moelith_compile_for_instruction_sets)
  foreach(isa IN ITEMS v3 avx2 avx512 amx)
    set(files ${ARGN})
    list(FILTER files INCLUDE REGEX "_${isa}\\.cpp$")
    if(files)
      set_property(SOURCE ${files} APPEND PROPERTY COMPILE_OPTIONS ${moelith_isa_flags_${isa}})
    endif()
  endforeach()
endfunction()
