// Stands for libcuda.so.1, CUDA's driver: a process that has loaded it computes
// on GPUs.
extern "C" int cuInit(unsigned) { return 0; }
