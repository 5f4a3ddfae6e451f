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

#include "attention.h"
#include "linear.h"
#include "pool.h"
#include "small.h"
#include "vectors.h"

namespace {

enum Type { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };  // of stored numbers

// Calls body with the pointer that the type stands for.
template <typename Body>
void with_type(const void* data, int type, const Body& body) {
    if (type == FLOAT32) body(static_cast<const float*>(data));
    if (type == BFLOAT16) body(static_cast<const bfloat16*>(data));
#if HAS_FLOAT16
    if (type == FLOAT16) body(static_cast<const float16*>(data));
#endif
}

}  // namespace

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

// y[rows][outputs] from x[rows][inputs]; w is packed (linear.h). epilogue: enum Epilogue.
void fb_linear(const float* x, int64_t rows, const void* w, int type, const float* bias, int64_t inputs,
               int64_t outputs, int epilogue, float* y) {
    with_type(w, type, [&](auto weights) {
        Linear<std::remove_cv_t<std::remove_pointer_t<decltype(weights)>>>{
            x, inputs, weights, bias, y, outputs, int(inputs), int(outputs), Epilogue(epilogue)}
            .run(int(rows));
    });
}

// Rows of the packed matrix w, [outputs][inputs], for embedding with the weights of the head.
void fb_rows_of_packed(const void* w, int type, int64_t inputs, const int32_t* ids, int64_t count, float* y) {
    with_type(w, type, [&](auto weights) {
        parallel(int(count), ROW_GRAIN, [&](int begin, int end) {
            for (int i = begin; i < end; i++)
                for (int64_t k = 0; k < inputs; k++)
                    y[i * inputs + k] = packed_element(weights + (ids[i] / PANEL * inputs + k) * PANEL, ids[i] % PANEL);
        });
    });
}

// y[rows][size] = rms_norm(x[rows][size]).
void fb_rms_norm(const float* x, const float* weight, float epsilon, int64_t rows, int64_t size, float* y) {
    parallel(int(rows), ROW_GRAIN, [&](int begin, int end) {
        for (int row = begin; row < end; row++) rms_norm(x + row * size, weight, epsilon, int(size), y + row * size);
    });
}

// qkv[tokens][(heads + 2 * kv_heads) * dim]: norms (if there are weights) and rotates queries and keys in place, and
// stores keys and values at their slots of the cache (layout: attention.h).
void fb_rotate_and_store(float* qkv, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim, const float* q_norm,
                         const float* k_norm, float epsilon, const int32_t* positions, const float* cosines,
                         const float* sines, int64_t half, const int32_t* slots, int64_t page_size, void* keys,
                         void* values, int type) {
    parallel(int(tokens), ROW_GRAIN, [&](int begin, int end) {
        for (int token = begin; token < end; token++) {
            float* row = qkv + token * (heads + 2 * kv_heads) * dim;
            for (int64_t head = 0; head < heads + kv_heads; head++) {
                float* x = row + head * dim;
                const float* norm = head < heads ? q_norm : k_norm;
                if (norm) rms_norm(x, norm, epsilon, int(dim), x);
                rotate(x, cosines + positions[token] * half, sines + positions[token] * half, int(half));
            }
            const int64_t block = slots[token] / page_size, offset = slots[token] % page_size;
            for (int64_t head = 0; head < kv_heads; head++) {
                const float *key = row + (heads + head) * dim, *value = key + kv_heads * dim;
                const int64_t page = (block * kv_heads + head) * page_size * dim;
                if (type == BFLOAT16)
                    store_token(key, value, dim, page_size, offset, static_cast<bfloat16*>(keys) + page,
                                static_cast<bfloat16*>(values) + page);
                else
                    store_token(key, value, dim, page_size, offset, static_cast<float*>(keys) + page,
                                static_cast<float*>(values) + page);
            }
        }
    });
}

void fb_attention(const float* query, int64_t query_stride, float* out, const void* keys, const void* values,
                  int type, const int32_t* begins, const int32_t* lengths, const int32_t* contexts,
                  const int32_t* tables, int64_t runs, int64_t most_blocks, int64_t heads, int64_t kv_heads,
                  int64_t k_dim, int64_t v_dim, int64_t page_size, float scale) {
    const auto run = [&](auto k, auto v) {
        Attention<std::remove_cv_t<std::remove_pointer_t<decltype(k)>>>{
            query, query_stride, out, k, v, begins, lengths, contexts, tables, int(runs), int(most_blocks), int(heads),
            int(kv_heads), int(k_dim), int(v_dim), int(page_size), scale}
            .run_all();
    };
    if (type == BFLOAT16)
        run(static_cast<const bfloat16*>(keys), static_cast<const bfloat16*>(values));
    else
        run(static_cast<const float*>(keys), static_cast<const float*>(values));
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
