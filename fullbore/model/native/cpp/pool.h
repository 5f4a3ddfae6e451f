// Loops shared by the threads of a stage.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Threads that share the items of one loop after another. The caller waits for items, not for threads: one that the
// system does not let run takes no items, and holds up nobody. Between loops threads spin for some microseconds.
class Pool {
   public:
    explicit Pool(int num_threads) {
        for (int i = 1; i < num_threads; i++) workers_.emplace_back([this] { work(); });
    }
    ~Pool() {
        stops_ = true;
        round_.fetch_add(1);
        round_.notify_all();
        for (auto& worker : workers_) worker.join();
    }
    int num_threads() const { return int(workers_.size()) + 1; }

    void run(void (*body)(const void*, int, int), const void* context, int num_items, int grain) {
        body_ = body, context_ = context, num_items_ = num_items, grain_ = grain;
        unfinished_.store(num_items, std::memory_order_relaxed);
        untaken_.store(num_items, std::memory_order_release);
        round_.fetch_add(1, std::memory_order_release);
        round_.notify_all();
        take_items();
        for (int spins = 0; unfinished_.load(std::memory_order_acquire) > 0; spins++) {
            if (spins < SPINS)
                pause();
            else
                std::this_thread::yield();
        }
    }

   private:
    static constexpr int SPINS = 4000;

    // The loop's other members may be read only by who has taken items of it: until those are finished it goes on.
    void take_items() {
        for (;;) {
            const int grain = grain_.load(std::memory_order_relaxed);  // of the loop before, perhaps: no harm
            const int left = untaken_.fetch_sub(grain, std::memory_order_acq_rel);
            if (left <= 0) return;
            const int begin = num_items_ - left, end = std::min(begin + grain, num_items_);
            body_(context_, begin, end);
            unfinished_.fetch_sub(end - begin, std::memory_order_release);
        }
    }
    void work() {
        for (uint32_t seen = 0;;) {
            for (int spins = 0; round_.load(std::memory_order_acquire) == seen; spins++) {
                if (spins < SPINS)
                    pause();
                else
                    round_.wait(seen, std::memory_order_acquire);
            }
            seen = round_.load(std::memory_order_acquire);
            if (stops_) return;
            take_items();
        }
    }

    std::vector<std::thread> workers_;
    std::atomic<uint32_t> round_{0};
    std::atomic<int> untaken_{0}, unfinished_{0}, grain_{1};
    std::atomic<bool> stops_{false};
    void (*body_)(const void*, int, int) = nullptr;
    const void* context_ = nullptr;
    int num_items_ = 0;
};

std::unique_ptr<Pool> pool;
std::mutex pool_mutex;  // one loop at a time; a second caller computes alone

// body(begin, end) over 0 … num_items-1.
template <typename Body>
void parallel(int num_items, int grain, const Body& body) {
    if (pool && num_items > grain && pool_mutex.try_lock()) {
        std::lock_guard lock(pool_mutex, std::adopt_lock);
        pool->run([](const void* context, int begin, int end) { (*static_cast<const Body*>(context))(begin, end); },
                  &body, num_items, grain);
    } else {
        body(0, num_items);
    }
}

int num_threads() { return pool ? pool->num_threads() : 1; }

}  // namespace
