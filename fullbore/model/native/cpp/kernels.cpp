// The native backend's operations on the CPU: linear layers on packed weights, attention over the paged KV cache, and
// the small operations between them. Everything is computed in float32; weights and cache may be stored as bfloat16.
//
// Every output element is summed in one fixed order, whatever else is in the batch and however many threads there are:
// a token's result does not depend on its neighbours.
//
// Built by build.py with the machine's own instruction set; called by cpu_kernels.py without Python's lock.

#include <atomic>
#include <cstdint>
#include <mutex>
#include <type_traits>

#include "layers.h"
#include "linear.h"
#include "pool.h"
#include "small.h"
#include "vectors.h"

extern "C" {

int fb_lanes() { return LANES; }
int fb_has_float16() { return HAS_FLOAT16; }

void fb_set_threads(int num_threads) {
    std::lock_guard lock(pool_mutex);
    if (num_threads == (pool ? pool->num_threads() : 1)) return;
    pool.reset(num_threads > 1 ? new Pool(num_threads) : nullptr);
}

void fb_pack(const void* w, int type, int64_t outputs, int64_t inputs, int is_gated, void* packed) {
    with_type(w, type, [&](auto weights) {
        using Weight = std::remove_cv_t<std::remove_pointer_t<decltype(weights)>>;
        pack(weights, int(outputs), inputs, is_gated, static_cast<Weight*>(packed));
    });
}

// y[rows][outputs] from x[rows][inputs]. epilogue: enum Epilogue.
void fb_linear(const Matrix* matrix, const float* x, int64_t rows, int epilogue, float* y) {
    linear(*matrix, x, rows, Epilogue(epilogue), y);
}

// Rows of a packed matrix, [outputs][inputs], for embedding with the weights of the head.
void fb_rows_of_packed(const Matrix* matrix, const int32_t* ids, int64_t count, float* y) {
    const int64_t inputs = matrix->inputs;
    with_type(matrix->weights, matrix->type, [&](auto weights) {
        parallel(int(count), ROW_GRAIN, [&](int begin, int end) {
            for (int i = begin; i < end; i++)
                for (int64_t k = 0; k < inputs; k++)
                    y[i * inputs + k] = packed_element(weights + (ids[i] / PANEL * inputs + k) * PANEL, ids[i] % PANEL);
        });
    });
}

void fb_rms_norm(const float* x, const float* weight, float epsilon, int64_t rows, int64_t size, float* y) {
    rms_norm_rows(x, weight, epsilon, rows, size, y);
}

void fb_attend(const Layer* layer, const Shape* shape, const Batch* batch, float* qkv, float* out) {
    attend(*layer, *shape, *batch, qkv, out);
}

void fb_run_layers(const Layer* layers, int64_t num_layers, const Shape* shape, const Batch* batch, float* hidden) {
    run_layers(layers, num_layers, *shape, *batch, hidden);
}

// Reads memory and does nothing with it, for benchmarks: returns a sum that keeps the compiler from leaving it out.
float fb_read(const float* from, int64_t size) {
    std::atomic<int> total{0};
    constexpr int64_t BLOCK = 1 << 16;
    parallel(int(size / BLOCK), 4, [&](int begin, int end) {
        Vec sums[8] = {};
        for (const float* at = from + begin * BLOCK; at < from + end * BLOCK; at += 8 * LANES) {
            __builtin_prefetch(at + 1024, 0, 3), __builtin_prefetch(at + 1024 + 4 * LANES, 0, 3);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) sums[i] += load(at + i * LANES);
        }
        for (int i = 1; i < 8; i++) sums[0] += sums[i];
        total += int(sum(sums[0]));
    });
    return float(total);
}
}
