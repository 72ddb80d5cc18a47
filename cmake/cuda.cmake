# CUDA sources, where there are any and nvcc is there. Nothing else in the tree needs CUDA.
file(GLOB_RECURSE moelith_cuda_sources CONFIGURE_DEPENDS src/*.cu)
set(moelith_cuda_tests ${moelith_cuda_sources})
list(FILTER moelith_cuda_sources EXCLUDE REGEX "_test\\.cu$")
list(FILTER moelith_cuda_tests INCLUDE REGEX "_test\\.cu$")

set(MOELITH_CUDA_ENABLED OFF)
if(NOT MOELITH_CUDA STREQUAL "OFF" AND NOT MOELITH_SANITIZE)
  find_program(MOELITH_NVCC nvcc HINTS $ENV{CUDA_HOME} $ENV{CUDA_PATH} /usr/local/cuda PATH_SUFFIXES bin)
  if(NOT MOELITH_NVCC AND MOELITH_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MOELITH_CUDA=ON, but nvcc was not found; set CUDA_HOME or pass -DMOELITH_NVCC=")
  endif()
  if(MOELITH_NVCC AND NOT MOELITH_CUTLASS_DIR)
    find_package(Python3 COMPONENTS Interpreter)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -c
        "import importlib.util, pathlib\nspec = importlib.util.find_spec('cutlass_library')\nprint(pathlib.Path(spec.origin).parent / 'source' / 'include' if spec else '', end='')"
      OUTPUT_VARIABLE cutlass ERROR_QUIET)
    if(cutlass AND EXISTS ${cutlass}/cutlass/cutlass.h)
      set(MOELITH_CUTLASS_DIR ${cutlass} CACHE PATH "" FORCE)
    endif()
  endif()
  if(NOT MOELITH_NVCC)
    message(STATUS "No CUDA: nvcc was not found")
  elseif(NOT EXISTS "${MOELITH_CUTLASS_DIR}/cute/arch/mma_sm90_gmma.hpp")
    set(moelith_no_cutlass "CUTLASS's headers were not found in '${MOELITH_CUTLASS_DIR}' or the Python package \
nvidia-cutlass; pass -DMOELITH_CUTLASS_DIR=")
    if(MOELITH_CUDA STREQUAL "ON")
      message(FATAL_ERROR "MOELITH_CUDA=ON, but ${moelith_no_cutlass}")
    endif()
    message(STATUS "No CUDA: ${moelith_no_cutlass}")
  elseif(moelith_cuda_sources OR moelith_cuda_tests)
    set(MOELITH_CUDA_ENABLED ON)
  endif()
endif()

if(MOELITH_CUDA_ENABLED)
  set(CMAKE_CUDA_COMPILER ${MOELITH_NVCC})
  set(CMAKE_CUDA_ARCHITECTURES OFF)  # given by hand: wgmma and setmaxnreg need the `a` of sm_90a
  enable_language(CUDA)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 knows no dialect of nvcc after C++17
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  find_package(CUDAToolkit REQUIRED)
  message(STATUS "CUDA: ${MOELITH_NVCC}, CUTLASS headers: ${MOELITH_CUTLASS_DIR}")
endif()

# moelith_cuda_options(target): how device code is compiled.
function(moelith_cuda_options target)
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_90a,code=sm_90a;--expt-relaxed-constexpr;--extended-lambda;-lineinfo;-Xcompiler=-Wall;-Xcompiler=-ffp-contract=off>")
  if(MOELITH_CUTLASS_DIR)
    target_include_directories(${target} SYSTEM PRIVATE ${MOELITH_CUTLASS_DIR})
  endif()
endfunction()

# ptxas says where it keeps registers in local memory; scripts/spills compares that with what is allowed.
file(GLOB moelith_persistent_kernels ${CMAKE_CURRENT_LIST_DIR}/../src/executors/cuda/sm90_forward_*.cu
  ${CMAKE_CURRENT_LIST_DIR}/../src/executors/cuda/sm90_backward_*.cu)
set_property(SOURCE ${moelith_persistent_kernels} APPEND PROPERTY COMPILE_OPTIONS "-Xptxas=--warn-on-spills")

# moelith_add_cuda_sources(target): adds src/**/*.cu to the library and tells its C++ files by MOELITH_WITH_CUDA=1.
function(moelith_add_cuda_sources target)
  if(MOELITH_CUDA_ENABLED AND moelith_cuda_sources)
    target_sources(${target} PRIVATE ${moelith_cuda_sources})
    moelith_cuda_options(${target})
    target_compile_definitions(${target} PRIVATE MOELITH_WITH_CUDA=1)
    target_link_libraries(${target} PUBLIC CUDA::cudart_static)
  endif()
endfunction()
