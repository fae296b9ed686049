// A small pool of threads that work through one decode step together, with barriers between its phases.
//
// Threads spin inside a step only, and yield soon, so that more threads than cores make progress too; between steps they
// sleep. One pool serves the process; callers take turns. A forked child starts a pool of its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace fastcar {

class Pool {
public:
    using Job = std::function<void(int thread)>;

    // The process's pool. Its size is FASTCAR_THREADS, or else the number of CPUs this process may use.
    static std::shared_ptr<Pool> get();
    // From now on use so many threads; 0 for the default.
    static void resize(int threads);

    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return size_; }

    // Run job(0 .. size - 1), thread 0 being the caller, to the end. The job must not throw.
    void run(const Job& job);

    // Inside a job: wait until every thread has come here.
    void barrier() {
        if (size_ > 1) wait_at_barrier();
    }

private:
    void work(int thread);
    void wait_at_barrier();

    int size_;
    const int process_;
    std::mutex turn_;
    std::mutex mutex_;
    std::condition_variable wake_;
    const Job* job_ = nullptr;
    bool stop_ = false;
    std::atomic<unsigned> round_{0};
    std::vector<std::thread> threads_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> phase_{0};
};

// This thread's share of n items, [begin, end).
struct Share {
    Share(int n, int thread, int threads)
        : begin(static_cast<int>(static_cast<long long>(n) * thread / threads)),
          end(static_cast<int>(static_cast<long long>(n) * (thread + 1) / threads)) {}
    int begin, end;
};

}  // namespace fastcar
