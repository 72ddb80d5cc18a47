#include "current_gpu.hpp"

#if defined(MOELITH_WITH_CUDA)
#include "cuda_check.hpp"
#endif

namespace moelith {

#if defined(MOELITH_WITH_CUDA)
int current_gpu() {
  int gpu = 0;
  return cudaGetDevice(&gpu) == cudaSuccess ? gpu : -1;
}
void make_gpu_current(int gpu) {
  if (gpu >= 0) check_cuda(cudaSetDevice(gpu), "cudaSetDevice");
}
#else
int current_gpu() { return -1; }
void make_gpu_current(int) {}
#endif

}  // namespace moelith
