// Attention of runs of tokens (decodes and prefill chunks alike) over the paged KV cache.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "multiply.h"
#include "pool.h"
#include "vectors.h"

namespace {

// Runs of tokens against the paged cache: keys [blocks][kv_heads][k_dim][page_size], so that a page is a panel, or more,
// of columns; values [blocks][kv_heads][page_size][v_dim].
template <typename Element>
struct Attention {
    const float* query;  // [tokens][query_stride], heads side by side
    ptrdiff_t query_stride;
    float* out;  // [tokens][heads * v_dim]
    const Element *keys, *values;
    const int32_t *begins;    // per run: its first token's row
    const int32_t *lengths;   // per run: its tokens
    const int32_t *contexts;  // per run: tokens of the request in the cache, with these
    const int32_t* tables;    // [runs][most_blocks]
    int runs, most_blocks, heads, kv_heads, k_dim, v_dim, page_size;
    float scale;

    static constexpr int TILE = std::max(32, PANEL);  // keys that are looked at together
    static constexpr int MOST_PANELS = 16;            // that are multiplied in one go
    static constexpr int MOST_ROWS = 48;  // of an item: query tokens times the heads that share a key head

    struct Item {
        int run, kv_head, first, count;  // query tokens first … first+count-1 of the run
    };

    struct Tile {
        const Item* item;  // null: there is none
        int position;
    };

    int group() const { return heads / kv_heads; }
    ptrdiff_t padded_v_dim() const { return (v_dim + PANEL - 1) / PANEL * PANEL; }

    void run_all() const {
        const int tokens_per_item = std::max(1, MOST_ROWS / group());
        std::vector<Item> items;
        for (int run = 0; run < runs; run++)
            for (int first = 0; first < lengths[run]; first += tokens_per_item)
                for (int head = 0; head < kv_heads; head++)
                    items.push_back({run, head, first, std::min(tokens_per_item, lengths[run] - first)});
        const int num_items = int(items.size());
        parallel(num_items, std::max(1, num_items / (8 * num_threads())), [&](int begin, int end) {
            for (int i = begin; i < end; i++) attend(items[i], i + 1 < end ? &items[i + 1] : nullptr);
        });
    }

    // ------------------------------------------------------------------------------------------------- the cache

    // The page that holds a position, of one head.
    const Element* page_of(const Element* cache, const Item& item, int position, int dim) const {
        const ptrdiff_t block = tables[ptrdiff_t(item.run) * most_blocks + position / page_size];
        return cache + (block * kv_heads + item.kv_head) * page_size * dim;
    }

    // Calls body(page, offset in it, count, tokens before) for each piece of positions begin … begin+count-1.
    template <typename Body>
    void for_pages(const Element* cache, const Item& item, int begin, int count, int dim, const Body& body) const {
        for (int done = 0; done < count;) {
            const int offset = (begin + done) % page_size, piece = std::min(count - done, page_size - offset);
            body(page_of(cache, item, begin + done, dim), offset, piece, done);
            done += piece;
        }
    }

    // Keys as panels of [k_dim][PANEL]: in place, or copied where a page is no multiple of a panel or no floats.
    // Columns of positions that are not there have no defined values. Returns the stride.
    ptrdiff_t key_panels(const Item& item, int position, int count, float* copies, const float** panels) const {
        if constexpr (std::is_same_v<Element, float>)
            if (page_size % PANEL == 0) {
                for (int p = 0; p * PANEL < count; p++) {
                    const int first = position + p * PANEL;
                    panels[p] = page_of(keys, item, first, k_dim) + first % page_size;
                }
                return page_size;
            }
        for_pages(keys, item, position, count, k_dim, [&](const Element* page, int offset, int piece, int done) {
            for (int k = 0; k < k_dim; k++)
                for (int i = 0; i < piece; i++)
                    copies[k * TILE + done + i] = to_float(page[k * page_size + offset + i]);
        });
        for (int p = 0; p < TILE / PANEL; p++) panels[p] = copies + p * PANEL;
        return TILE;
    }

    // Where a tile's keys lie, panel by panel, for fetching them; returns the bytes between rows, 0: do not fetch.
    ptrdiff_t next_keys(const Tile& tile, const char** panels) const {
        if (!tile.item || page_size % (64 / int(sizeof(Element))) != 0) return 0;
        const int last = contexts[tile.item->run] - 1;
        for (int p = 0; p * PANEL < TILE; p++) {
            const int position = std::min(tile.position + p * PANEL, last);
            const Element* page = page_of(keys, *tile.item, position, k_dim);
            panels[p] = reinterpret_cast<const char*>(page + position % page_size);
        }
        return page_size * ptrdiff_t(sizeof(Element));
    }

    // Values as rows `stride` apart, padded with zeros: in place where they lie so in the cache, else copied.
    const float* value_rows(const Item& item, int position, int count, float* copies, ptrdiff_t stride) const {
        if constexpr (std::is_same_v<Element, float>)
            if (position % page_size + count <= page_size && stride == v_dim)
                return page_of(values, item, position, v_dim) + position % page_size * v_dim;
        for_pages(values, item, position, count, v_dim, [&](const Element* page, int offset, int piece, int done) {
            for (int i = 0; i < piece; i++) {
                const Element* row = page + (offset + i) * v_dim;
                float* to = copies + (done + i) * stride;
                for (int d = 0; d < v_dim; d++) to[d] = to_float(row[d]);
                for (ptrdiff_t d = v_dim; d < stride; d++) to[d] = 0;
            }
        });
        return copies;
    }

    // ---------------------------------------------------------------------------------------------- computation

    // One thread's working memory, each part at the start of a cache line.
    struct Scratch {
        std::vector<float> memory;
        float *query, *copies, *scores, *sums, *highest, *total;

        void layout(const Attention& a) {
            const ptrdiff_t width = a.padded_v_dim(), most_rows = std::max(MOST_ROWS, a.group());
            const ptrdiff_t sizes[] = {most_rows * a.k_dim, TILE * std::max<ptrdiff_t>(a.k_dim, width),
                                       most_rows * TILE,    most_rows * width,
                                       most_rows,           most_rows};
            float** const parts[] = {&query, &copies, &scores, &sums, &highest, &total};
            ptrdiff_t size = LINE;
            for (ptrdiff_t part : sizes) size += (part + LINE - 1) / LINE * LINE;
            if (ptrdiff_t(memory.size()) < size) memory.resize(size);
            float* next = memory.data() + (-reinterpret_cast<intptr_t>(memory.data()) & 63) / sizeof(float);
            for (int i = 0; i < 6; i++) *parts[i] = next, next += (sizes[i] + LINE - 1) / LINE * LINE;
        }
        static constexpr ptrdiff_t LINE = 64 / sizeof(float);
    };

    // Softmax over the keys tile by tile: weights are relative to the highest score so far (arXiv 1805.02867).
    // Pages lie anywhere, so no processor guesses which is next: while one tile is computed the next one is fetched.
    void attend(const Item& item, const Item* next_item) const {
        static thread_local Scratch scratch;
        Scratch& s = scratch;
        s.layout(*this);
        const int rows = item.count * group();
        const ptrdiff_t width = padded_v_dim();
        for (int row = 0; row < rows; row++) {
            const float* from = query + token_of(item, row) * query_stride + head_of(item, row) * k_dim;
            for (int k = 0; k < k_dim; k++) s.query[row * k_dim + k] = from[k] * scale;
            s.highest[row] = -INFINITY, s.total[row] = 0;
        }
        std::fill(s.sums, s.sums + rows * width, 0.0f);
        const int start = contexts[item.run] - lengths[item.run] + item.first;  // position of the first query token
        const int end = start + item.count;
        for (int position = 0; position < end; position += TILE) {
            const int count = std::min(TILE, end - position);
            const Tile next = position + TILE < end ? Tile{&item, position + TILE} : Tile{next_item, 0};
            const float* panels[MOST_PANELS];
            const char* ahead[MOST_PANELS];
            const ptrdiff_t stride = key_panels(item, position, count, s.copies, panels);
            const ptrdiff_t step = next_keys(next, ahead);
            product(s.query, k_dim, rows, panels, (count + PANEL - 1) / PANEL, stride, k_dim, s.scores, TILE, false,
                    ahead, step);
            for (int row = 0; row < rows; row++) weigh(s, row, start + row / group() + 1 - position, width);
            add_values(s, item, position, count, rows, width, next);
        }
        for (int row = 0; row < rows; row++) {
            float* to = out + (token_of(item, row) * heads + head_of(item, row)) * v_dim;
            for (int d = 0; d < v_dim; d++) to[d] = s.sums[row * width + d] / s.total[row];
        }
    }

    ptrdiff_t token_of(const Item& item, int row) const { return begins[item.run] + item.first + row / group(); }
    ptrdiff_t head_of(const Item& item, int row) const { return item.kv_head * group() + row % group(); }

    // One row's scores become weights; only the first `visible` keys count. A NaN among them spoils this row alone.
    void weigh(Scratch& s, int row, int visible, ptrdiff_t width) const {
        float* scores = s.scores + row * TILE;
        for (int key = std::max(visible, 0); key < TILE; key++) scores[key] = -INFINITY;
        Vec most = load(scores);
        for (int i = LANES; i < TILE; i += LANES) most = most > load(scores + i) ? most : load(scores + i);
        const float highest = std::max(s.highest[row], max(most));
        if (highest > s.highest[row]) {
            const Vec shrink = exp(broadcast(s.highest[row] - highest));
            s.total[row] *= shrink[0];
            float* sums = s.sums + row * width;
            for (int d = 0; d < width; d += LANES) store(sums + d, load(sums + d) * shrink);
            s.highest[row] = highest;
        }
        Vec total{};
        for (int i = 0; i < TILE; i += LANES) {
            const Vec weights = exp(load(scores + i) - highest);
            store(scores + i, weights);
            total += weights;
        }
        s.total[row] += sum(total);
    }

    // Where the next tile's values lie that are as far behind its begin; null: do not fetch.
    const char* next_values(const Tile& tile, int offset) const {
        if (!tile.item || tile.position + offset >= contexts[tile.item->run]) return nullptr;
        const int position = tile.position + offset;
        return reinterpret_cast<const char*>(page_of(values, *tile.item, position, v_dim) +
                                             position % page_size * v_dim);
    }

    // sums += weights · values, in pieces that lie together in the cache.
    void add_values(Scratch& s, const Item& item, int position, int count, int rows, ptrdiff_t width,
                    const Tile& next) const {
        for (int done = 0; done < count;) {
            const int piece = std::min(count - done, std::max(PANEL, page_size - (position + done) % page_size));
            const float* values = value_rows(item, position + done, piece, s.copies, width);
            const char* rows_ahead = next_values(next, done);
            for (ptrdiff_t column = 0; column < width; column += MOST_PANELS * PANEL) {
                const float* panels[MOST_PANELS];
                const char* ahead[MOST_PANELS];
                const int num_panels = int(std::min<ptrdiff_t>(MOST_PANELS, (width - column) / PANEL));
                for (int p = 0; p < num_panels; p++) {
                    panels[p] = values + column + p * PANEL;
                    ahead[p] = rows_ahead ? rows_ahead + (column + p * PANEL) * sizeof(Element) : nullptr;
                }
                product(s.scores + done, TILE, rows, panels, num_panels, width, piece, s.sums + column, width, true,
                        ahead, rows_ahead ? v_dim * ptrdiff_t(sizeof(Element)) : 0);
            }
            done += piece;
        }
    }

    // out[rows][panels * PANEL] (+)= x[rows][inputs] · panels. Meanwhile fetches a line of memory per input and panel,
    // from `ahead` on, step bytes apart (0: nothing).
    static void product(const float* x, ptrdiff_t x_stride, int rows, const float* const* panels, int num_panels,
                        ptrdiff_t w_stride, int inputs, float* out, ptrdiff_t out_stride, bool adds,
                        const char* const* ahead, ptrdiff_t step) {
        const int tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
        for (int t = 0, row = 0; t < tiles; t++) {
            const int count = (rows - row + tiles - t - 1) / (tiles - t);
            const ptrdiff_t own_step = t == 0 ? step : 0;
            with_rows(count, [&]<int ROWS>() {
                constexpr int PANELS = panels_at_once(ROWS);
                const float* from = x + row * x_stride;
                float* to = out + row * out_stride;
                int p = 0;
                for (; p + PANELS <= num_panels; p += PANELS)
                    tile<ROWS, PANELS>(from, x_stride, panels + p, w_stride, inputs, to + p * PANEL, out_stride, adds,
                                       ahead + p, own_step);
                for (; p < num_panels; p++)
                    tile<ROWS, 1>(from, x_stride, panels + p, w_stride, inputs, to + p * PANEL, out_stride, adds,
                                  ahead + p, own_step);
            });
            row += count;
        }
    }

    template <int ROWS, int PANELS>
    static void tile(const float* x, ptrdiff_t x_stride, const float* const* panels, ptrdiff_t w_stride, int inputs,
                     float* out, ptrdiff_t out_stride, bool adds, const char* const* ahead, ptrdiff_t step) {
        const float* w[PANELS];
        const char* next[PANELS];
        Vec sums[ROWS][PANELS][2] = {};
        for (int p = 0; p < PANELS; p++) {
            w[p] = panels[p], next[p] = step ? ahead[p] : nullptr;
            for (int r = 0; r < ROWS && adds; r++)
                for (int half = 0; half < 2; half++)
                    sums[r][p][half] = load(out + r * out_stride + p * PANEL + half * LANES);
        }
        multiply<ROWS, PANELS>(x, x_stride, w, w_stride, inputs, next, step, sums);
        for (int r = 0; r < ROWS; r++)
            for (int p = 0; p < PANELS; p++)
                for (int half = 0; half < 2; half++)
                    store(out + r * out_stride + p * PANEL + half * LANES, sums[r][p][half]);
    }
};

}  // namespace
