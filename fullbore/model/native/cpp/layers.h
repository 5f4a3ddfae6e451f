// All layers of a stage in one call: pre-norm residual blocks of attention and a gated MLP.
//
// The structures are filled in by cpu_kernels.py, which has the same fields in the same order.

#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "pool.h"
#include "small.h"
#include "vectors.h"

namespace {

enum Type { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };  // of stored numbers

// Calls body with the pointer that the type stands for.
template <typename Body>
void with_type(const void* data, int64_t type, const Body& body) {
    if (type == FLOAT32) body(static_cast<const float*>(data));
    if (type == BFLOAT16) body(static_cast<const bfloat16*>(data));
#if HAS_FLOAT16
    if (type == FLOAT16) body(static_cast<const float16*>(data));
#endif
}

struct Matrix {
    const void* weights;  // packed (linear.h)
    const float* bias;    // or null
    int64_t type, inputs, outputs;
};

struct Layer {
    const float *attention_norm, *mlp_norm;
    const float *q_norm, *k_norm;  // or null
    Matrix qkv, output, gate_up, down;
    void *keys, *values;  // this layer's blocks of the cache (attention.h)
};

struct Shape {
    int64_t hidden_size, heads, kv_heads, dim, page_size;
    int64_t cache_type;  // FLOAT32 or BFLOAT16
    float epsilon, scale;

    int64_t qkv_size() const { return (heads + 2 * kv_heads) * dim; }
};

struct Batch {
    int64_t tokens, runs, most_blocks;
    const int32_t *positions, *slots;              // [tokens]
    const int32_t *begins, *lengths, *contexts;    // [runs], see Attention
    const int32_t* tables;                         // [runs][most_blocks]
    const float *cosines, *sines;                  // [positions][dim / 2]
};

// y[rows][outputs] from x[rows][inputs].
void linear(const Matrix& matrix, const float* x, int64_t rows, Epilogue epilogue, float* y) {
    with_type(matrix.weights, matrix.type, [&](auto weights) {
        Linear<std::remove_cv_t<std::remove_pointer_t<decltype(weights)>>>{
            x, ptrdiff_t(matrix.inputs), weights, matrix.bias, y, ptrdiff_t(matrix.outputs), int(matrix.inputs),
            int(matrix.outputs), epilogue}
            .run(int(rows));
    });
}

// y[rows][size] = rms_norm(x[rows][size]).
void rms_norm_rows(const float* x, const float* weight, float epsilon, int64_t rows, int64_t size, float* y) {
    parallel(int(rows), ROW_GRAIN, [&](int begin, int end) {
        for (int row = begin; row < end; row++) rms_norm(x + row * size, weight, epsilon, int(size), y + row * size);
    });
}

// qkv[tokens][qkv_size]: norms (if there are weights) and rotates queries and keys in place, and stores keys and values
// at their slots of the cache.
template <typename Element>
void rotate_and_store(const Layer& layer, const Shape& shape, const Batch& batch, float* qkv, Element* keys,
                      Element* values) {
    const int64_t dim = shape.dim, half = dim / 2;
    parallel(int(batch.tokens), ROW_GRAIN, [&](int begin, int end) {
        for (int token = begin; token < end; token++) {
            float* row = qkv + token * shape.qkv_size();
            const int64_t angles = batch.positions[token] * half;
            for (int64_t head = 0; head < shape.heads + shape.kv_heads; head++) {
                float* x = row + head * dim;
                const float* norm = head < shape.heads ? layer.q_norm : layer.k_norm;
                if (norm) rms_norm(x, norm, shape.epsilon, int(dim), x);
                rotate(x, batch.cosines + angles, batch.sines + angles, int(half));
            }
            const int64_t block = batch.slots[token] / shape.page_size, offset = batch.slots[token] % shape.page_size;
            for (int64_t head = 0; head < shape.kv_heads; head++) {
                const float *key = row + (shape.heads + head) * dim, *value = key + shape.kv_heads * dim;
                const int64_t page = (block * shape.kv_heads + head) * shape.page_size * dim;
                store_token(key, value, dim, shape.page_size, offset, keys + page, values + page);
            }
        }
    });
}

// out[tokens][heads * dim] from qkv[tokens][qkv_size], which is changed.
void attend(const Layer& layer, const Shape& shape, const Batch& batch, float* qkv, float* out) {
    const auto run = [&](auto keys, auto values) {
        rotate_and_store(layer, shape, batch, qkv, keys, values);
        Attention<std::remove_pointer_t<decltype(keys)>>{
            qkv, ptrdiff_t(shape.qkv_size()), out, keys, values, batch.begins, batch.lengths, batch.contexts,
            batch.tables, int(batch.runs), int(batch.most_blocks), int(shape.heads), int(shape.kv_heads),
            int(shape.dim), int(shape.dim), int(shape.page_size), shape.scale}
            .run_all();
    };
    if (shape.cache_type == BFLOAT16)
        run(static_cast<bfloat16*>(layer.keys), static_cast<bfloat16*>(layer.values));
    else
        run(static_cast<float*>(layer.keys), static_cast<float*>(layer.values));
}

// Activations between the operations of a layer, kept from step to step, each at the start of a cache line.
struct Activations {
    std::vector<float> memory;
    float *normed, *qkv, *attended, *gated;

    void layout(const Layer& layer, const Shape& shape, int64_t tokens) {
        const int64_t sizes[] = {shape.hidden_size, shape.qkv_size(), shape.heads * shape.dim, layer.gate_up.outputs};
        float** const parts[] = {&normed, &qkv, &attended, &gated};
        int64_t size = LINE;
        for (int64_t part : sizes) size += rounded(part * tokens);
        if (int64_t(memory.size()) < size) memory.resize(size);
        float* next = memory.data() + (-reinterpret_cast<intptr_t>(memory.data()) & 63) / sizeof(float);
        for (int i = 0; i < 4; i++) *parts[i] = next, next += rounded(sizes[i] * tokens);
    }
    static constexpr int64_t LINE = 64 / sizeof(float);
    static int64_t rounded(int64_t size) { return (size + LINE - 1) / LINE * LINE; }
};

// hidden[tokens][hidden_size] goes through all layers, in place.
void run_layers(const Layer* layers, int64_t num_layers, const Shape& shape, const Batch& batch, float* hidden) {
    static thread_local Activations a;
    const int64_t tokens = batch.tokens;
    for (const Layer* layer = layers; layer < layers + num_layers; layer++) {
        a.layout(*layer, shape, tokens);
        rms_norm_rows(hidden, layer->attention_norm, shape.epsilon, tokens, shape.hidden_size, a.normed);
        linear(layer->qkv, a.normed, tokens, STORE, a.qkv);
        attend(*layer, shape, batch, a.qkv, a.attended);
        linear(layer->output, a.attended, tokens, ADD, hidden);
        rms_norm_rows(hidden, layer->mlp_norm, shape.epsilon, tokens, shape.hidden_size, a.normed);
        linear(layer->gate_up, a.normed, tokens, GATE, a.gated);
        linear(layer->down, a.gated, tokens, ADD, hidden);
    }
}

}  // namespace
