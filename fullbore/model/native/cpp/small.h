// The small operations between linear layers and attention, one row at a time.

#pragma once

#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace {

constexpr int ROW_GRAIN = 4;  // rows of a small operation that are worth sharing with another thread

// y = x / rms(x) * weight, one row. x and y may be the same.
void rms_norm(const float* x, const float* weight, float epsilon, int size, float* y) {
    Vec squares[4] = {};
    float rest = 0;
    int i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            const Vec v = load(x + i + j * LANES);
            squares[j] += v * v;
        }
    for (; i < size; i++) rest += x[i] * x[i];
    const float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) + rest;
    const float factor = 1.0f / std::sqrt(total / float(size) + epsilon);
    for (i = 0; i < size; i++) y[i] = x[i] * factor * weight[i];
}

// Rotates the first 2 * half elements of one head: pairs (i, i + half).
void rotate(float* x, const float* cosines, const float* sines, int half) {
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i] + a * sines[i];
    }
}

// One head's key into a column of its page, the value into a row.
template <typename Element>
void store_token(const float* key, const float* value, int64_t dim, int64_t page_size, int64_t offset, Element* keys,
                 Element* values) {
    for (int64_t i = 0; i < dim; i++) from_float(key[i], keys + i * page_size + offset);
    for (int64_t i = 0; i < dim; i++) from_float(value[i], values + offset * dim + i);
}

}  // namespace
