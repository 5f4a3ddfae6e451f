// Linear layers on packed weights: [panels][inputs][PANEL], so that a panel is read from memory in one go, once.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "multiply.h"
#include "pool.h"
#include "vectors.h"

namespace {

enum Epilogue { STORE = 0, ADD = 1, GATE = 2 };

// One column's element of a panel's row.
template <typename Weight>
INLINE float packed_element(const Weight* row, int column) {
    if constexpr (std::is_same_v<Weight, bfloat16>) return to_float(row[column % LANES * 2 + column / LANES]);
    return to_float(row[column]);
}

template <typename Weight>
struct Linear {
    const float* x;
    ptrdiff_t x_stride;
    const Weight* w;  // [panels][inputs][PANEL]
    const float* bias;  // [panels * PANEL] or null
    float* y;
    ptrdiff_t y_stride;
    int inputs, outputs;  // outputs: columns of y
    Epilogue epilogue;

    ptrdiff_t panel_stride() const { return ptrdiff_t(inputs) * PANEL; }

    void finish(int row, int panel, Vec first, Vec second) const {
        if (bias) first += load(bias + panel * PANEL), second += load(bias + panel * PANEL + LANES);
        const int width = epilogue == GATE ? LANES : PANEL;
        if (epilogue == GATE) first = first / (1.0f + exp(-first)) * second;
        float* to = y + row * y_stride + ptrdiff_t(panel) * width;
        const int valid = std::min(outputs - panel * width, width);
        if (valid == width) {
            if (epilogue == ADD) first += load(to), second += load(to + LANES);
            store(to, first);
            if (epilogue != GATE) store(to + LANES, second);
            return;
        }
        float values[PANEL];
        store(values, first), store(values + LANES, second);
        for (int i = 0; i < valid; i++) to[i] = epilogue == ADD ? to[i] + values[i] : values[i];
    }

    // While a panel is multiplied the next one is fetched: tile `t` of `tiles` fetches its share of it.
    template <int ROWS, int PANELS>
    void tile(int row, int panel, int t, int tiles) const {
        const Weight* own[PANELS];
        const char* next[PANELS];
        for (int p = 0; p < PANELS; p++) {
            own[p] = w + (panel + p) * panel_stride();
            next[p] = reinterpret_cast<const char*>(own[p] + PANELS * panel_stride() + t * panel_stride() / tiles);
        }
        Vec sums[ROWS][PANELS][2] = {};
        const ptrdiff_t prefetch_step = PANEL * sizeof(Weight) / tiles;
        multiply<ROWS, PANELS>(x + row * x_stride, x_stride, own, PANEL, inputs, next, prefetch_step, sums);
        for (int r = 0; r < ROWS; r++)
            for (int p = 0; p < PANELS; p++) finish(row + r, panel + p, sums[r][p][0], sums[r][p][1]);
    }

    // `rows` rows against panels `panel` … `end-1`.
    void tiles_of_panels(int rows, int row, int panel, int end, int t, int tiles) const {
        with_rows(rows, [&]<int ROWS>() {
            constexpr int PANELS = panels_at_once(ROWS);
            int next = panel;
            for (; next + PANELS <= end; next += PANELS) tile<ROWS, PANELS>(row, next, t, tiles);
            for (; next < end; next++) tile<ROWS, 1>(row, next, t, tiles);
        });
    }

    // Rows whose inputs stay in the second-level cache, against some panels, each read once from memory.
    void block(int row, int rows, int begin, int end) const {
        const int tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
        const int together = tiles == 1 ? end - begin : 1;
        for (int panel = begin; panel < end; panel += together)
            for (int t = 0, done = 0; t < tiles; t++) {
                const int count = (rows - done + tiles - t - 1) / (tiles - t);
                tiles_of_panels(count, row + done, panel, panel + together, t, tiles);
                done += count;
            }
    }

    void run(int rows) const {
        const int width = epilogue == GATE ? LANES : PANEL;
        const int panels = (outputs + width - 1) / width;
        const int most_rows = std::max(MAX_ROWS, int(256 * 1024 / (sizeof(float) * inputs)) / MAX_ROWS * MAX_ROWS);
        const int together = panels_at_once(std::min(rows, MAX_ROWS));
        const int grain = num_threads() == 1 ? panels : std::max(1, panels / (num_threads() * 6 * together)) * together;
        for (int row = 0; row < rows; row += most_rows)
            parallel(panels, grain,
                     [&](int begin, int end) { block(row, std::min(most_rows, rows - row), begin, end); });
    }
};

// Lays out w[outputs][inputs] in panels; of a gated layer, whose gates come first, gates beside their ups. Outputs that
// are not there become zeros.
template <typename Weight>
void pack(const Weight* w, int outputs, int64_t inputs, bool is_gated, Weight* packed) {
    const int width = is_gated ? LANES : PANEL;
    parallel((outputs + width - 1) / width, 1, [&](int begin, int end) {
        for (int panel = begin; panel < end; panel++)
            for (int column = 0; column < PANEL; column++) {
                const int output = panel * width + (is_gated ? column % LANES : column);
                const int64_t row = is_gated && column >= LANES ? outputs + output : output;
                const bool is_pair = std::is_same_v<Weight, bfloat16>;
                Weight* to = packed + panel * inputs * PANEL + (is_pair ? column % LANES * 2 + column / LANES : column);
                for (int64_t k = 0; k < inputs; k++) to[k * PANEL] = output < outputs ? w[row * inputs + k] : Weight{};
            }
    });
}

}  // namespace
