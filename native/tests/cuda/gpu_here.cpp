// Whether the CUDA runtime finds a GPU, as every program beside this one asks first: they take minutes to compile, this one a second. 2: there is none.
#include <cstdio>

// Of cuda_runtime.h, which takes longer to read than all of this to build.
extern "C" int cudaGetDeviceCount(int* count);
extern "C" const char* cudaGetErrorString(int error);

int main() {
  int devices = 0;
  const int error = cudaGetDeviceCount(&devices);
  if (error == 0 && devices > 0) return 0;
  std::printf("no GPU: %s\n", error == 0 ? "the driver finds none" : cudaGetErrorString(error));
  return 2;
}
