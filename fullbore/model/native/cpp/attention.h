// Attention of runs of tokens (decodes and prefill chunks alike) over the paged KV cache.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "pool.h"
#include "vectors.h"

namespace {

// out[i][k] = in[k][i] for a square of 8 by 8 floats.
INLINE void transpose_8x8(const float* in, ptrdiff_t in_stride, float* out, ptrdiff_t out_stride) {
    typedef float Row __attribute__((vector_size(32)));
    typedef int32_t Order __attribute__((vector_size(32)));
    Row a[8], b[8];
    for (int i = 0; i < 8; i++) std::memcpy(&a[i], in + i * in_stride, sizeof a[i]);
    const auto mix = [](Row x, Row y, Order order) {
#if defined(__clang__)
        Row result;
        for (int i = 0; i < 8; i++) result[i] = order[i] < 8 ? x[order[i]] : y[order[i] - 8];
        return result;
#else
        return __builtin_shuffle(x, y, order);
#endif
    };
    for (int i = 0; i < 8; i += 2) {
        b[i] = mix(a[i], a[i + 1], Order{0, 8, 1, 9, 4, 12, 5, 13});
        b[i + 1] = mix(a[i], a[i + 1], Order{2, 10, 3, 11, 6, 14, 7, 15});
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = mix(b[i + j], b[i + j + 2], Order{0, 1, 8, 9, 4, 5, 12, 13});
            a[i + 2 * j + 1] = mix(b[i + j], b[i + j + 2], Order{2, 3, 10, 11, 6, 7, 14, 15});
        }
    for (int i = 0; i < 4; i++) {
        b[i] = mix(a[i], a[i + 4], Order{0, 1, 2, 3, 8, 9, 10, 11});
        b[i + 4] = mix(a[i], a[i + 4], Order{4, 5, 6, 7, 12, 13, 14, 15});
    }
    for (int i = 0; i < 8; i++) std::memcpy(out + i * out_stride, &b[i], sizeof b[i]);
}

// Runs of tokens against the paged cache [blocks][kv_heads][page_size][dim].
template <typename Element>
struct Attention {
    const float* query;  // [tokens][query_stride], heads side by side
    ptrdiff_t query_stride;
    float* out;  // [tokens][heads * v_dim]
    const Element *keys, *values;
    const int32_t *begins;   // per run: its first token's row
    const int32_t *lengths;  // per run: its tokens
    const int32_t *contexts; // per run: tokens of the request in the cache, with these
    const int32_t* tables;   // [runs][most_blocks]
    int runs, most_blocks, heads, kv_heads, k_dim, v_dim, page_size;
    float scale;

    static constexpr int TILE = PANEL;      // keys that are scored together: a panel
    static constexpr int MOST_ROWS = 48;    // query tokens times the heads that share a key head

    struct Item {
        int run, kv_head, first, count;  // query tokens first … first+count-1 of the run
    };

    int group() const { return heads / kv_heads; }
    int padded_v_dim() const { return (v_dim + PANEL - 1) / PANEL * PANEL; }

    void run_all() const {
        const int tokens_per_item = std::max(1, MOST_ROWS / group());
        std::vector<Item> items;
        for (int run = 0; run < runs; run++)
            for (int first = 0; first < lengths[run]; first += tokens_per_item)
                for (int head = 0; head < kv_heads; head++)
                    items.push_back({run, head, first, std::min(tokens_per_item, lengths[run] - first)});
        const int grain = std::max(1, int(items.size()) / (8 * num_threads()));
        parallel(int(items.size()), grain, [&](int begin, int end) {
            for (int i = begin; i < end; i++) attend(items[i]);
        });
    }

    const Element* row_of(const Element* cache, const Item& item, int position, int dim) const {
        const ptrdiff_t block = tables[ptrdiff_t(item.run) * most_blocks + position / page_size];
        return cache + ((block * kv_heads + item.kv_head) * page_size + position % page_size) * dim;
    }

    // Rows position … position+count-1 of one head as floats, `stride` apart and padded with zeros: in place where they
    // lie so in the cache, else copied. There is memory up to row position+reach-1.
    const float* load_rows(const Element* cache, const Item& item, int position, int count, int reach, int dim,
                           ptrdiff_t stride, float* copies) const {
        if constexpr (std::is_same_v<Element, float>)
            if (position / page_size == (position + reach - 1) / page_size && stride == dim)
                return row_of(cache, item, position, dim);
        for (int i = 0; i < count; i++) {
            const Element* row = row_of(cache, item, position + i, dim);
            float* to = copies + i * stride;
            for (int d = 0; d < dim; d++) to[d] = to_float(row[d]);
            for (ptrdiff_t d = dim; d < stride; d++) to[d] = 0;
        }
        return copies;
    }

    // `count` rows of keys (a multiple of 8) as a panel: [k_dim][TILE].
    void transpose(const float* rows, int count, float* panel) const {
        const int squares = k_dim / 8 * 8;
        for (int key = 0; key < count; key += 8)
            for (int k = 0; k < squares; k += 8)
                transpose_8x8(rows + key * k_dim + k, k_dim, panel + k * TILE + key, TILE);
        for (int k = squares; k < k_dim; k++)
            for (int key = 0; key < count; key++) panel[k * TILE + key] = rows[key * k_dim + k];
    }

    struct Scratch {
        std::vector<float> query, keys, copies, scores, sums;
        float highest[MOST_ROWS], total[MOST_ROWS];
    };

    void attend(const Item& item) const {
        static thread_local Scratch s;
        const int rows = item.count * group();
        const ptrdiff_t width = padded_v_dim();
        s.query.resize(size_t(rows) * k_dim), s.keys.resize(size_t(k_dim) * TILE), s.copies.resize(TILE * std::max<ptrdiff_t>(k_dim, width));
        s.scores.resize(size_t(rows) * TILE), s.sums.assign(rows * width, 0.0f);
        for (int row = 0; row < rows; row++) {
            const ptrdiff_t token = begins[item.run] + item.first + row / group();
            const float* from = query + token * query_stride + (item.kv_head * group() + row % group()) * k_dim;
            for (int k = 0; k < k_dim; k++) s.query[row * k_dim + k] = from[k] * scale;
            s.highest[row] = -INFINITY, s.total[row] = 0;
        }
        const int start = contexts[item.run] - lengths[item.run] + item.first;  // position of the first query token
        for (int position = 0; position < start + item.count; position += TILE) {
            const int count = std::min(TILE, start + item.count - position);
            const int reach = (count + 7) / 8 * 8;  // what lies behind the last key is scored too, and then hidden
            const float* k = load_rows(keys, item, position, count, reach, k_dim, k_dim, s.copies.data());
            transpose(k, reach, s.keys.data());
            multiply_rows(s.query.data(), k_dim, rows, s.keys.data(), TILE, k_dim, s.scores.data(), TILE, TILE, false);
            for (int row = 0; row < rows; row++)
                weigh(s, row, std::min(count, start + row / group() + 1 - position), width);
            const float* v = load_rows(values, item, position, count, count, v_dim, width, s.copies.data());
            multiply_rows(s.scores.data(), TILE, rows, v, width, count, s.sums.data(), width, int(width), true);
        }
        for (int row = 0; row < rows; row++) {
            const ptrdiff_t token = begins[item.run] + item.first + row / group();
            float* to = out + (token * heads + item.kv_head * group() + row % group()) * v_dim;
            for (int d = 0; d < v_dim; d++) to[d] = s.sums[row * width + d] / s.total[row];
        }
    }

    // One row's scores become weights relative to the highest score so far; only the first `visible` keys count.
    void weigh(Scratch& s, int row, int visible, ptrdiff_t width) const {
        float* scores = &s.scores[row * TILE];
        for (int key = std::max(visible, 0); key < TILE; key++) scores[key] = -INFINITY;
        float highest = s.highest[row];
        for (int key = 0; key < TILE; key++) highest = scores[key] > highest ? scores[key] : highest;
        if (highest > s.highest[row]) {
            const Vec shrink = exp(broadcast(s.highest[row] - highest));
            s.total[row] *= shrink[0];
            for (int d = 0; d < width; d += LANES) store(&s.sums[row * width + d], load(&s.sums[row * width + d]) * shrink);
            s.highest[row] = highest;
        }
        const Vec first = exp(load(scores) - highest), second = exp(load(scores + LANES) - highest);
        store(scores, first), store(scores + LANES, second);
        s.total[row] += sum(first + second);
    }

    // out[rows][columns] (+)= x[rows][inputs] · w[inputs][columns], all row-major, columns a multiple of PANEL.
    static void multiply_rows(const float* x, ptrdiff_t x_stride, int rows, const float* w, ptrdiff_t w_stride, int inputs,
                              float* out, ptrdiff_t out_stride, int columns, bool adds) {
        int row = 0;
        for (; row + MAX_ROWS <= rows; row += MAX_ROWS)
            tile<MAX_ROWS>(x + row * x_stride, x_stride, w, w_stride, inputs, out + row * out_stride, out_stride, columns, adds);
        for (; row + 3 <= rows; row += 3)
            tile<3>(x + row * x_stride, x_stride, w, w_stride, inputs, out + row * out_stride, out_stride, columns, adds);
        for (; row < rows; row++)
            tile<1>(x + row * x_stride, x_stride, w, w_stride, inputs, out + row * out_stride, out_stride, columns, adds);
    }

    template <int ROWS>
    static void tile(const float* x, ptrdiff_t x_stride, const float* w, ptrdiff_t w_stride, int inputs, float* out,
                     ptrdiff_t out_stride, int columns, bool adds) {
        for (int column = 0; column < columns; column += PANEL) {
            Vec s[ROWS][2] = {};
            if (adds)
                for (int r = 0; r < ROWS; r++) {
                    const float* from = out + r * out_stride + column;
                    s[r][0] = load(from), s[r][1] = load(from + LANES);
                }
            for (int k = 0; k < inputs; k++) {
                const float* at = w + k * w_stride + column;
                const Vec first = load(at), second = load(at + LANES);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    const Vec input = broadcast(x[r * x_stride + k]);
                    s[r][0] += input * first, s[r][1] += input * second;
                }
            }
            for (int r = 0; r < ROWS; r++) {
                float* to = out + r * out_stride + column;
                store(to, s[r][0]), store(to + LANES, s[r][1]);
            }
        }
    }
};

}  // namespace
