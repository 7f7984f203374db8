// For a kernel that includes it: all of it that kernels get on the CPU is in cpu.h.
#pragma once
#include "../cpu.h"
