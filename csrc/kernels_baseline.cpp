#define FASTCAR_NAME "baseline"
#define FASTCAR_WIDTH 4
#include "kernels.inl"

const fastcar::Kernels& fastcar::baseline_kernels() { return kTable; }
