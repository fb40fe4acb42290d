// Turns the CPU into four accelerators named "played": own memory, streams, events and a process group, CPU arithmetic.
//
// Device memory is host memory, so every operator runs the CPU's own kernel on a CPU tensor that aliases the device
// tensor: results are bit-identical to the CPU. What is played is everything around the arithmetic, and it is played
// strictly: queued copies run late and on other threads, freed memory is overwritten, streams do not wait for each
// other unless told to, so that a program with a forgotten wait computes wrong numbers here instead of sometimes on
// real hardware.
//
// Threads never take Python's lock: whatever a queue holds is raw memory (Block) or aliases of it, never a tensor that
// Python could know.

#include <torch/csrc/utils/pybind.h>

#include <ATen/SDPBackend.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/op_registration/adaption.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/library.h>

#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

// From the OpenMP library that PyTorch has loaded; declared here so that no OpenMP header or flag is needed.
extern "C" void omp_set_num_threads(int);

namespace played {

using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::Stream;
using c10::StreamId;
using at::Tensor;
using torch::jit::Stack;
using Clock = std::chrono::steady_clock;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 8;
constexpr StreamId kStreams = 33;  // the default stream and a pool of 32, as CUDA has
constexpr int kPoison = 0xFF;      // NaN in every floating type

size_t number_from_environment(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::strtoull(text, nullptr, 10) : otherwise;
}

std::atomic<size_t>& delay_microseconds() {
  static std::atomic<size_t> delay{number_from_environment("PLAYED_DELAY_US", 300)};
  return delay;
}

// ---------------------------------------------------------------------------------------------------------------------
// Markers and queues: what events and streams are made of
// ---------------------------------------------------------------------------------------------------------------------

// A point that some queue will reach: once, with the time and possibly with an error.
class Marker {
 public:
  void complete(std::exception_ptr error = nullptr) {
    std::vector<std::function<void()>> callbacks;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done_ = true;
      error_ = std::move(error);
      when_ = Clock::now();
      callbacks.swap(callbacks_);
    }
    reached_.notify_all();
    for (auto& callback : callbacks) callback();
  }

  bool done() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_;
  }

  std::exception_ptr error() {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }

  Clock::time_point when() {
    std::lock_guard<std::mutex> lock(mutex_);
    return when_;
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    reached_.wait(lock, [this] { return done_; });
    if (error_) std::rethrow_exception(error_);
  }

  bool wait_for(std::chrono::milliseconds time) {
    std::unique_lock<std::mutex> lock(mutex_);
    return reached_.wait_for(lock, time, [this] { return done_; });
  }

  // Calls back in the thread that completes the marker, or here if that has happened.
  void then(std::function<void()> callback) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!done_) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback();
  }

 private:
  std::mutex mutex_;
  std::condition_variable reached_;
  bool done_ = false;
  std::exception_ptr error_;
  Clock::time_point when_;
  std::vector<std::function<void()>> callbacks_;
};

using MarkerPointer = std::shared_ptr<Marker>;

void after_all(const std::vector<MarkerPointer>& markers, std::function<void()> action) {
  auto missing = std::make_shared<std::atomic<size_t>>(markers.size() + 1);
  auto arrive = [missing, action = std::move(action)] {
    if (missing->fetch_sub(1) == 1) action();
  };
  for (const auto& marker : markers) marker->then(arrive);
  arrive();
}

// Work in order on a thread of its own, which starts with the first entry.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  void push(std::function<void()> entry) {
    std::lock_guard<std::mutex> lock(mutex_);
    push_locked(std::move(entry));
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return finished_ == pushed_;
  }

  // Waits for everything pushed so far and reports the first error since the last drain, as CUDA reports late.
  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t target = pushed_;
    moved_.wait(lock, [&] { return finished_ >= target; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  bool drain_until(Clock::time_point deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    return moved_.wait_until(lock, deadline, [&] { return finished_ >= pushed_; });
  }

  MarkerPointer mark() {
    auto marker = std::make_shared<Marker>();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (finished_ != pushed_) {
        push_locked([marker] { marker->complete(); });
        return marker;
      }
    }
    marker->complete();
    return marker;
  }

  void await(const MarkerPointer& marker) {
    if (marker->done() && !marker->error()) return;
    push([marker] { marker->wait(); });
  }

  // The thread ends after the entries pushed so far; nobody waits for it.
  void close() {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

 private:
  void push_locked(std::function<void()> entry) {
    entries_.push_back(std::move(entry));
    ++pushed_;
    if (!started_) {
      started_ = true;
      std::thread([self = shared_from_this()] { self->work(); }).detach();
    }
    changed_.notify_all();
  }

  void work() {
    omp_set_num_threads(1);  // one copy does not need a team, and each thread here would start a team of its own
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closed_ || !entries_.empty(); });
      if (entries_.empty()) return;
      run_first(lock);
    }
  }

  void run_first(std::unique_lock<std::mutex>& lock) {
    auto entry = std::move(entries_.front());
    entries_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      entry();
    } catch (...) {
      error = std::current_exception();
    }
    entry = nullptr;  // gives memory back before the entry counts as finished
    lock.lock();
    if (error && !error_) error_ = error;
    ++finished_;
    moved_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_, moved_;
  std::deque<std::function<void()>> entries_;
  uint64_t pushed_ = 0, finished_ = 0;
  bool started_ = false, closed_ = false;
  std::exception_ptr error_;
};

using QueuePointer = std::shared_ptr<Queue>;

// ---------------------------------------------------------------------------------------------------------------------
// The current device and stream of a thread
// ---------------------------------------------------------------------------------------------------------------------

thread_local DeviceIndex current_device = 0;
thread_local std::array<StreamId, kDevices> current_stream{};

void check_device(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "played: there is no device ", int(index), ", only 0 to ", kDevices - 1);
}

DeviceIndex index_of(Device device) {
  const DeviceIndex index = device.has_index() ? device.index() : current_device;
  check_device(index);
  return index;
}

class OnDevice {
 public:
  explicit OnDevice(DeviceIndex index) : previous_(std::exchange(current_device, index)) {}
  ~OnDevice() { current_device = previous_; }

 private:
  DeviceIndex previous_;
};

// Never destroyed: threads may still look at it while the process ends.
std::array<std::array<QueuePointer, kStreams>, kDevices>& queues() {
  static auto* all = [] {
    auto* made = new std::array<std::array<QueuePointer, kStreams>, kDevices>();
    for (auto& device : *made)
      for (auto& queue : device) queue = std::make_shared<Queue>();
    return made;
  }();
  return *all;
}

const QueuePointer& queue_of(const Stream& stream) {
  const StreamId id = stream.id();
  TORCH_CHECK(id >= 0 && id < kStreams, "played: there is no stream ", id);
  return queues()[index_of(stream.device())][id];
}

const QueuePointer& current_queue(DeviceIndex index) { return queues()[index][current_stream[index]]; }

// ---------------------------------------------------------------------------------------------------------------------
// Memory
// ---------------------------------------------------------------------------------------------------------------------

// One allocation. Queue entries share it, so the addresses stay valid (though poisoned) until they ran.
struct Block {
  void* data = nullptr;
  size_t size = 0;
  DeviceIndex device = -1;              // -1: pinned host memory
  bool owned = true;                    // else somebody pinned memory that was there already
  QueuePointer home;                    // the stream it was allocated on, in whose order it is freed
  std::vector<QueuePointer> users;      // streams named by record_stream
  std::vector<MarkerPointer> holds;     // process group operations
  ~Block() {
    if (owned) std::free(data);
  }
};

using BlockPointer = std::shared_ptr<Block>;

class Registry {
 public:
  void add(const BlockPointer& block) {
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[address(block->data)] = block;
  }

  BlockPointer take(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.find(address(data));
    if (found == blocks_.end()) return nullptr;
    auto block = found->second;
    blocks_.erase(found);
    return block;
  }

  BlockPointer find(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = blocks_.upper_bound(address(data));
    if (next == blocks_.begin()) return nullptr;
    auto block = std::prev(next)->second;
    return address(data) < address(block->data) + block->size ? block : nullptr;
  }

  template <class Action>
  void with(const void* data, Action action) {
    auto block = find(data);
    std::lock_guard<std::mutex> lock(mutex_);
    if (block) action(*block);
  }

 private:
  static uintptr_t address(const void* data) { return reinterpret_cast<uintptr_t>(data); }
  std::mutex mutex_;
  std::map<uintptr_t, BlockPointer> blocks_;
};

Registry& registry() {
  static auto* made = new Registry();
  return *made;
}

BlockPointer new_block(size_t size, DeviceIndex device) {
  auto block = std::make_shared<Block>();
  TORCH_CHECK(posix_memalign(&block->data, c10::gAlignment, size) == 0, "played: the host has no ", size, " bytes");
  block->size = size;
  block->device = device;
  return block;
}

// What one device has in use. "Active" is what fills the capacity: memory of live tensors and memory that was freed
// but that other streams still use.
struct Memory {
  std::mutex mutex;
  std::condition_variable released;
  size_t capacity = number_from_environment("PLAYED_MEMORY", size_t(1) << 30);
  double fraction = 1.0;
  size_t deferred = 0;
  c10::CachingDeviceAllocator::DeviceStats stats;

  size_t limit() const { return static_cast<size_t>(static_cast<double>(capacity) * fraction); }
  size_t active() const { return static_cast<size_t>(stats.active_bytes[0].current); }
  bool fits(size_t size) const { return active() + size <= limit(); }

  void take(size_t size) {
    for (auto* stat : {&stats.allocated_bytes, &stats.requested_bytes, &stats.active_bytes, &stats.reserved_bytes})
      (*stat)[0].increase(size);
    for (auto* stat : {&stats.allocation, &stats.active, &stats.segment}) (*stat)[0].increase(1);
    ++stats.num_device_alloc;
  }

  void give_up(size_t size) {
    for (auto* stat : {&stats.allocated_bytes, &stats.requested_bytes}) (*stat)[0].decrease(size);
    stats.allocation[0].decrease(1);
  }

  void give_back(size_t size) {
    for (auto* stat : {&stats.active_bytes, &stats.reserved_bytes}) (*stat)[0].decrease(size);
    for (auto* stat : {&stats.active, &stats.segment}) (*stat)[0].decrease(1);
    ++stats.num_device_free;
  }
};

Memory& memory_of(DeviceIndex index) {
  static auto* all = new std::array<Memory, kDevices>();
  check_device(index);
  return (*all)[index];
}

void reserve(DeviceIndex index, size_t size) {
  auto& memory = memory_of(index);
  std::unique_lock<std::mutex> lock(memory.mutex);
  memory.released.wait(lock, [&] { return memory.fits(size) || memory.deferred == 0; });
  if (!memory.fits(size)) {
    ++memory.stats.num_ooms;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "played:", int(index), " out of memory. Tried to allocate ", size, " bytes; ",
        memory.active(), " of ", memory.limit(), " bytes are in use.");
  }
  memory.take(size);
}

// A free is an entry of the streams concerned, as in CUDA's caching allocator: the block's own stream keeps its order,
// other streams count only if record_stream (or the process group) named them.
void release_device(void* data) {
  auto block = registry().take(data);
  if (!block) return;
  std::vector<MarkerPointer> pending;
  for (const auto& user : block->users)
    if (auto marker = user->mark(); !marker->done()) pending.push_back(marker);
  for (const auto& hold : block->holds)
    if (!hold->done()) pending.push_back(hold);
  const bool deferred = !pending.empty();
  auto& memory = memory_of(block->device);
  {
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.give_up(block->size);
    deferred ? void(++memory.deferred) : memory.give_back(block->size);
  }
  if (auto marker = block->home->mark(); !marker->done()) pending.push_back(marker);
  after_all(pending, [block, deferred, &memory] {
    std::memset(block->data, kPoison, block->size);
    if (!deferred) return;
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.give_back(block->size);
    --memory.deferred;
    memory.released.notify_all();
  });
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    const DeviceIndex index = current_device;
    const Device device(kType, index);
    if (size == 0) return {nullptr, nullptr, &release_device, device};
    reserve(index, size);
    auto block = new_block(size, index);
    block->home = current_queue(index);
    std::memset(block->data, kPoison, size);  // so that reading what was never written shows, too
    registry().add(block);
    return {block->data, block->data, &release_device, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release_device; }
  void copy_data(void* target, const void* source, size_t size) const override { std::memcpy(target, source, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}

  void recordStream(const c10::DataPtr& pointer, Stream stream) override {
    const auto& queue = queue_of(stream);
    registry().with(pointer.get(), [&](Block& block) {
      const auto& users = block.users;
      if (queue != block.home && std::find(users.begin(), users.end(), queue) == users.end())
        block.users.push_back(queue);
    });
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    auto& memory = memory_of(index);
    std::lock_guard<std::mutex> lock(memory.mutex);
    return memory.stats;
  }

  void resetAccumulatedStats(DeviceIndex index) override {
    for_each_stat(index, [](auto& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(DeviceIndex index) override {
    for_each_stat(index, [](auto& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    auto& memory = memory_of(index);
    std::lock_guard<std::mutex> lock(memory.mutex);
    const size_t active = memory.active();
    return {memory.capacity > active ? memory.capacity - active : 0, memory.capacity};
  }

 private:
  template <class Action>
  void for_each_stat(DeviceIndex index, Action action) {
    auto& memory = memory_of(index);
    std::lock_guard<std::mutex> lock(memory.mutex);
    auto& stats = memory.stats;
    for (auto* stat : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
                       &stats.active_bytes, &stats.requested_bytes})
      action((*stat)[0]);
  }
};

void release_pinned(void* data) { registry().take(data); }  // queued copies still share the block

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &release_pinned, c10::kCPU};
    auto block = new_block(size, -1);
    registry().add(block);
    return {block->data, block->data, &release_pinned, c10::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* target, const void* source, size_t size) const override { std::memcpy(target, source, size); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceAllocator& device_allocator() {
  static auto* made = new DeviceAllocator();
  return *made;
}

PinnedAllocator& pinned_allocator() {
  static auto* made = new PinnedAllocator();
  return *made;
}

// As cudaHostRegister: from now on copies with this memory can be queued.
void pin(uintptr_t address, size_t size) {
  auto block = std::make_shared<Block>();
  block->data = reinterpret_cast<void*>(address);
  block->size = size;
  block->owned = false;
  registry().add(block);
}

bool is_pinned(const void* data) {
  auto block = registry().find(data);
  return block && block->device < 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// The guard (devices, streams, events) and the hooks that torch.accelerator asks
// ---------------------------------------------------------------------------------------------------------------------

// Where it was recorded last; threads may share it.
class Event {
 public:
  void set(MarkerPointer marker) {
    std::lock_guard<std::mutex> lock(mutex_);
    marker_ = std::move(marker);
  }

  MarkerPointer get() {
    std::lock_guard<std::mutex> lock(mutex_);
    return marker_;
  }

 private:
  std::mutex mutex_;
  MarkerPointer marker_;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return {kType, current_device}; }
  void setDevice(Device device) const override { current_device = index_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }

  Device exchangeDevice(Device device) const override {
    const auto previous = getDevice();
    setDevice(device);
    return previous;
  }

  Stream getStream(Device device) const override {
    const auto index = index_of(device);
    return stream(index, current_stream[index]);
  }

  Stream getDefaultStream(Device device) const override { return stream(index_of(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }

  Stream getNewStream(Device device, int) const override {
    static std::array<std::atomic<StreamId>, kDevices> next{};
    const auto index = index_of(device);
    return stream(index, 1 + next[index].fetch_add(1) % (kStreams - 1));
  }

  Stream exchangeStream(Stream wanted) const override {
    const auto index = index_of(wanted.device());
    queue_of(wanted);  // checks the number
    return stream(index, std::exchange(current_stream[index], wanted.id()));
  }

  void* getStreamNativeHandle(const Stream wanted) const override { return queue_of(wanted).get(); }
  bool queryStream(const Stream& wanted) const override { return queue_of(wanted)->idle(); }
  void synchronizeStream(const Stream& wanted) const override { queue_of(wanted)->drain(); }

  void synchronizeDevice(const DeviceIndex index) const override {
    check_device(index);
    for (const auto& queue : queues()[index]) queue->drain();
  }

  void record(void** event, const Stream& on, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    static_cast<Event*>(*event)->set(queue_of(on)->mark());
  }

  void block(void* event, const Stream& waiting) const override {
    if (auto marker = marker_of(event)) queue_of(waiting)->await(marker);
  }

  bool queryEvent(void* event) const override {
    auto marker = marker_of(event);
    return !marker || marker->done();
  }

  void synchronizeEvent(void* event) const override {
    if (auto marker = marker_of(event)) marker->wait();
  }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto from = marker_of(first), to = marker_of(second);
    TORCH_CHECK(from && to && from->done() && to->done(), "played: both events must be completed to tell the time");
    return std::chrono::duration<double, std::milli>(to->when() - from->when()).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& on) const override {
    device_allocator().recordStream(pointer, on);
  }

 private:
  static Stream stream(DeviceIndex index, StreamId id) { return Stream(Stream::UNSAFE, Device(kType, index), id); }
  static MarkerPointer marker_of(void* event) { return event ? static_cast<Event*>(event)->get() : nullptr; }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  // Numbers are drawn from the CPU's generator, so that one seed gives the same numbers on both.
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }

  void setCurrentDevice(DeviceIndex index) const override {
    check_device(index);
    current_device = index;
  }

  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    check_device(index);
    return std::exchange(current_device, index);
  }

  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current_device : exchangeDevice(index);
  }

  Device getDeviceFromPtr(void* data) const override {
    auto block = registry().find(data);
    TORCH_CHECK(block && block->device >= 0, "played: this is not an address of device memory");
    return {kType, block->device};
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const DeviceIndex index = storage.device().index();
    current_queue(index)->drain();
    OnDevice guard(index);
    auto fresh = device_allocator().allocate(size);
    const size_t common = std::min(size, storage.nbytes());
    if (common && storage.data()) std::memcpy(fresh.get(), storage.data(), common);
    impl->set_data_ptr(std::move(fresh));
    impl->set_nbytes(size);
  }
};

const Hooks& hooks() {
  static auto* made = new Hooks();
  return *made;
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensors: aliases on the CPU, new tensors on the device
// ---------------------------------------------------------------------------------------------------------------------

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// The storage's bytes as CPU storage. It shares the block but owns no tensor: freeing the device tensor poisons it.
c10::Storage alias_storage(const c10::Storage& storage) {
  void* data = storage.mutable_data();
  auto* lease = new BlockPointer(registry().find(data));
  c10::DataPtr pointer(data, lease, [](void* held) { delete static_cast<BlockPointer*>(held); }, c10::kCPU);
  return c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer), c10::GetCPUAllocator(), true);
}

void take_shape(const Tensor& made, const Tensor& like) {
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
}

Tensor cpu_tensor(c10::Storage storage, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(DispatchKey::CPU), like.dtype());
  take_shape(made, like);
  return made;
}

// With the keys of its base, as PyTorch's own views: in inference mode, a view of a normal tensor is a normal tensor.
Tensor view_of(const Tensor& base, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), like.dtype());
  take_shape(made, like);
  return made;
}

Tensor on_cpu(const Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == c10::kStrided, "played: only strided tensors, got ", tensor.layout());
  return cpu_tensor(alias_storage(tensor.storage()), tensor);
}

c10::DispatchKeySet device_keys() { return c10::DispatchKeySet(DispatchKey::PrivateUse1); }

// A device tensor with the bytes of a CPU result, strides included.
Tensor fresh(const Tensor& result, DeviceIndex index) {
  if (!result.defined()) return result;
  TORCH_CHECK(result.layout() == c10::kStrided, "played: only strided tensors, got ", result.layout());
  OnDevice guard(index);
  Tensor made = at::detail::empty_strided_generic(
      result.sizes(), result.strides(), &device_allocator(), device_keys(), result.scalar_type());
  if (made.numel())
    std::memcpy(
        made.mutable_data_ptr(), result.const_data_ptr(),
        at::detail::computeStorageNbytes(result.sizes(), result.strides(), result.element_size()));
  if (result.is_conj()) made._set_conj(true);
  if (result.is_neg()) made._set_neg(true);
  return made;
}

// ---------------------------------------------------------------------------------------------------------------------
// Every operator that the CPU has a kernel for
// ---------------------------------------------------------------------------------------------------------------------

// One call of one operator: which device tensors went in, and as which aliases.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : schema_(op.schema()) {}

  c10::IValue to_cpu(const c10::IValue& value, const std::string& argument) {
    if (value.isTensor()) return enter(value.toTensor(), argument);
    if (value.isTensorList()) return enter_list(value.toTensorList(), argument);
    if (value.isOptionalTensorList()) return enter_list(value.toOptionalTensorList(), argument);
    if (value.isDevice() && value.toDevice().type() == kType) {
      if (!device_) device_ = Device(kType, index_of(value.toDevice()));
      return Device(c10::kCPU);
    }
    return value;
  }

  // CUDA's rule: one device, except for CPU tensors without dimensions and a few arguments that belong on the host.
  void check_same_device() const {
    TORCH_CHECK(
        !stray_ || !tensor_device_, "Expected all tensors to be on the same device, but found at least two devices, ",
        *tensor_device_, " and ", *stray_, "! (argument ", stray_argument_, " of ", schema_.name(), ")");
  }

  DeviceIndex index() const { return device_ ? device_->index() : current_device; }

  // Out arguments that the kernel resized: their device tensors follow.
  void follow_resized() {
    for (auto& [original, aliased] : tensors_) {
      const auto& storage = original.storage();
      if (storage.data() != aliased.storage().data()) {
        hooks().resizePrivateUse1Bytes(storage, aliased.storage().nbytes());
        if (storage.nbytes()) std::memcpy(storage.mutable_data(), aliased.storage().data(), storage.nbytes());
      }
      if (original.sizes() != aliased.sizes() || original.strides() != aliased.strides())
        original.unsafeGetTensorImpl()->set_sizes_and_strides(aliased.sizes(), aliased.strides());
    }
  }

  c10::IValue to_device(const c10::IValue& value, bool view) const {
    if (value.isTensor()) return leave(value.toTensor(), view);
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(leave(tensor, view));
    return list;
  }

 private:
  static bool host_argument(const std::string& name) {
    return name == "indices" || name == "scalars" || name == "lengths";
  }

  Tensor enter(const Tensor& tensor, const std::string& argument) {
    if (!tensor.defined()) return tensor;
    if (!on_device(tensor)) {
      if (tensor.dim() > 0 && !host_argument(argument)) note_stray(tensor.device(), argument);
      return tensor;
    }
    if (!tensor_device_) device_ = tensor_device_ = tensor.device();
    if (tensor.device() != *tensor_device_) note_stray(tensor.device(), argument);
    for (auto& [original, aliased] : tensors_)
      if (original.is_same(tensor)) return aliased;
    tensors_.emplace_back(tensor, cpu_tensor(enter_storage(tensor), tensor));
    return tensors_.back().second;
  }

  // One alias per storage, so that the kernels' own checks of overlapping arguments see what they would see.
  c10::Storage enter_storage(const Tensor& tensor) {
    TORCH_CHECK(tensor.layout() == c10::kStrided, "played: only strided tensors, got ", tensor.layout());
    for (auto& [original, aliased] : tensors_)
      if (original.storage().is_alias_of(tensor.storage())) return aliased.storage();
    return alias_storage(tensor.storage());
  }

  template <class List>
  List enter_list(const List& list, const std::string& argument) {
    List entered;
    entered.reserve(list.size());
    for (const std::optional<Tensor> tensor : list) {
      if constexpr (std::is_same_v<List, c10::List<Tensor>>)
        entered.push_back(enter(*tensor, argument));
      else
        entered.push_back(tensor ? std::optional<Tensor>(enter(*tensor, argument)) : std::nullopt);
    }
    return entered;
  }

  void note_stray(Device device, const std::string& argument) {
    if (stray_) return;
    stray_ = device;
    stray_argument_ = argument;
  }

  Tensor leave(const Tensor& result, bool view) const {
    if (view && result.defined())
      for (const auto& [original, aliased] : tensors_)
        if (aliased.storage().is_alias_of(result.storage())) return view_of(original, result);
    return fresh(result, index());
  }

  const c10::FunctionSchema& schema_;
  std::vector<std::pair<Tensor, Tensor>> tensors_;
  std::optional<Device> device_, tensor_device_, stray_;
  std::string stray_argument_;
};

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }
bool views(const c10::Argument& argument) { return argument.alias_info() && !argument.alias_info()->isWrite(); }

// What an in-place or out= operator gives back: the very argument it wrote to.
c10::IValue written_argument(
    const c10::FunctionSchema& schema, const c10::Argument& result, const std::vector<c10::IValue>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i)
    if (writes(schema.arguments()[i]) &&
        schema.arguments()[i].alias_info()->beforeSets() == result.alias_info()->beforeSets())
      return arguments[i];
  TORCH_INTERNAL_ASSERT(false, "played: no written argument for a result of ", schema.name());
}

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const std::vector<c10::IValue> arguments(stack->end() - static_cast<ptrdiff_t>(count), stack->end());
  Call call(op);
  for (size_t i = 0; i < count; ++i)
    (*stack)[stack->size() - count + i] = call.to_cpu(arguments[i], schema.arguments()[i].name());
  call.check_same_device();
  const bool only_views =
      !schema.returns().empty() && std::all_of(schema.returns().begin(), schema.returns().end(), views);
  if (!only_views) current_queue(call.index())->drain();
  {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    op.callBoxed(stack);
  }
  call.follow_resized();
  const size_t first = stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto& result = schema.returns()[i];
    auto& value = (*stack)[first + i];
    value = writes(result) ? written_argument(schema, result, arguments) : call.to_device(value, views(result));
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Operators that must know about the device
// ---------------------------------------------------------------------------------------------------------------------

Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "played: only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(c10::kStrided) == c10::kStrided, "played: only strided tensors, got ", *layout);
  OnDevice guard(index_of(device.value_or(Device(kType))));
  return at::detail::empty_generic(size, &device_allocator(), device_keys(), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "played: only dense CPU tensors can be pinned");
  OnDevice guard(index_of(device.value_or(Device(kType))));
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator(), device_keys(), c10::dtype_or_default(dtype));
}

// Whether the copy engine could do it: between devices always, with the host only as a plain transfer of pinned memory.
bool can_be_queued(const Tensor& source, const Tensor& target) {
  if (on_device(source) && on_device(target)) return true;
  const Tensor& host = on_device(source) ? target : source;
  return source.scalar_type() == target.scalar_type() && source.sizes() == target.sizes() &&
      source.strides() == target.strides() && source.is_non_overlapping_and_dense() &&
      source.is_conj() == target.is_conj() && source.is_neg() == target.is_neg() && is_pinned(host.const_data_ptr());
}

void push_copy(const QueuePointer& queue, const Tensor& source, const Tensor& target) {
  queue->push([from = on_cpu(source), to = on_cpu(target)] {
    std::this_thread::sleep_for(std::chrono::microseconds(delay_microseconds()));
    to.copy_(from);
  });
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  const Device device = (on_device(source) ? source : target).device();
  const auto& queue = current_queue(device.index());
  const bool between = on_device(source) && on_device(target) && source.device() != target.device();
  // As in CUDA, a copy between devices runs on the source's stream, between two barriers with the target's.
  const auto& other = between ? current_queue(target.device().index()) : queue;
  if (between) queue->await(other->mark());
  if (non_blocking && can_be_queued(source, target)) {
    push_copy(queue, source, target);
    if (between) other->await(queue->mark());
    return target;
  }
  queue->drain();
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  (on_device(target) ? on_cpu(target) : target).copy_(on_device(source) ? on_cpu(source) : source);
  return target;
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  const size_t needed =
      at::detail::computeStorageNbytesContiguous(size, self.element_size(), self.storage_offset());
  if (needed > self.storage().nbytes()) hooks().resizePrivateUse1Bytes(self.storage(), needed);
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

Tensor& set_storage_offset(
    Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty())
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  const size_t needed = at::detail::computeStorageNbytes(size, self.strides(), self.element_size(), offset);
  if (needed > self.storage().nbytes()) hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage_offset(self, std::move(source), 0, {length}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& self) {
  OnDevice guard(self.device().index());
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, &device_allocator(), true);
  return set_storage_offset(self, std::move(nothing), 0, {0}, {});
}

bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.storage().is_alias_of(other.storage()) && self.storage_offset() == other.storage_offset() &&
      self.sizes() == other.sizes() && self.strides() == other.strides();
}

void record_stream(Tensor& self, Stream stream) { device_allocator().recordStream(self.storage().data_ptr(), stream); }

// Lets `parameter.data = ...` and Module.to keep the parameter object, as they do between the CPU and CUDA.
bool compatible(const Tensor& self, const Tensor& from) {
  auto dense = [](const Tensor& tensor) {
    return tensor.layout() == c10::kStrided && (on_device(tensor) || tensor.device().is_cpu());
  };
  return dense(self) && dense(from);
}

// The CPU's way to drop out; PyTorch would take a fused kernel with other rounding on this device.
Tensor dropout(const Tensor& input, double probability, bool train) {
  TORCH_CHECK(
      probability >= 0 && probability <= 1, "dropout probability has to be between 0 and 1, but got ", probability);
  if (probability == 0 || !train || input.numel() == 0) return input;
  if (probability == 1) return input.mul(at::zeros({}, input.options()));
  auto noise = at::empty_like(input);
  noise.bernoulli_(1 - probability);
  noise.div_(1 - probability);
  return input.mul(noise);
}

int64_t choose_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>,
    bool) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_empty);
  library.impl("is_set_to", &is_set_to);
  library.impl("record_stream", &record_stream);
  library.impl("_has_compatible_shallow_copy_type", &compatible);
  library.impl("dropout", &dropout);
  library.impl("_fused_sdp_choice", &choose_attention);
  // The CPU picks among several convolutions inside these.
  library.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  library.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) { library.impl("dropout", &dropout); }

// Copies resolve lazy conjugates and signs themselves; PyTorch's fallback would resolve them by a copy, for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// Without this, operators that have both a CPU kernel and a generic one would run the generic one here: other bits.
void register_cpu_kernels() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasKernelForDispatchKey(DispatchKey::CPU) || op->hasKernelForDispatchKey(DispatchKey::PrivateUse1))
      continue;
    const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    library->impl((name.name.substr(6) + overload).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Autocast: PyTorch's own lists, cast without a template for each operator (that would take minutes to compile)
// ---------------------------------------------------------------------------------------------------------------------

template <class Action>
void for_each_tensor(c10::IValue& value, Action action) {
  if (value.isTensor()) {
    value = action(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(action(tensor));
    value = list;
  }
}

void call_without_autocast(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(DispatchKey::AutocastPrivateUse1);
  op.callBoxed(stack);
}

void call_cast(const c10::OperatorHandle& op, Stack* stack, at::ScalarType dtype) {
  {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(DispatchKey::AutocastPrivateUse1);
    for (auto value = stack->end() - ptrdiff_t(op.schema().arguments().size()); value != stack->end(); ++value)
      for_each_tensor(*value, [&](const Tensor& tensor) { return at::autocast::cached_cast(dtype, tensor, kType); });
  }
  call_without_autocast(op, stack);
}

void autocast_lower(const c10::OperatorHandle& op, Stack* stack) {
  call_cast(op, stack, at::autocast::get_autocast_dtype(kType));
}

void autocast_float(const c10::OperatorHandle& op, Stack* stack) { call_cast(op, stack, at::kFloat); }

void autocast_float_result(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto first = stack->end() - static_cast<ptrdiff_t>(arguments.size());
  if (at::autocast::is_eligible(first->toTensor(), kType))
    for (size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].name() == "dtype" && first[ptrdiff_t(i)].isNone()) first[ptrdiff_t(i)] = at::kFloat;
  call_without_autocast(op, stack);
}

void autocast_widest(const c10::OperatorHandle& op, Stack* stack) {
  auto widest = at::autocast::get_autocast_dtype(kType);
  for (auto value = stack->end() - ptrdiff_t(op.schema().arguments().size()); value != stack->end(); ++value)
    for_each_tensor(*value, [&](const Tensor& tensor) {
      if (tensor.defined()) widest = at::autocast::prioritize(widest, tensor, kType);
      return tensor;
    });
  call_cast(op, stack, widest);
}

#define PLAYED_PICK(first, second, picked, ...) picked
#define PLAYED_NAME(operator_name) #operator_name,
#define PLAYED_NAME_OVERLOAD(operator_name, overload) #operator_name "." #overload,
#define PLAYED_NAMES(...) PLAYED_PICK(__VA_ARGS__, PLAYED_NAME_OVERLOAD, PLAYED_NAME)(__VA_ARGS__)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (const char* name : {AT_FORALL_LOWER_PRECISION_FP(PLAYED_NAMES)})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast_lower>());
  for (const char* name : {AT_FORALL_FP32(PLAYED_NAMES) "norm.Scalar", "norm.ScalarOpt_dim"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast_float>());
  for (const char* name : {AT_FORALL_FP32_SET_OPT_DTYPE(PLAYED_NAMES)})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast_float_result>());
  for (const char* name : {AT_FORALL_PROMOTE(PLAYED_NAMES)})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast_widest>());
}

// ---------------------------------------------------------------------------------------------------------------------
// The process group "pccl": NCCL's habits over an inner gloo group
// ---------------------------------------------------------------------------------------------------------------------

class GroupWork final : public c10d::Work {
 public:
  GroupWork(int rank, c10d::OpType type) : c10d::Work(rank, type) {}

  bool isCompleted() override { return marker->done(); }
  bool isSuccess() const override { return marker->done() && !marker->error(); }
  std::exception_ptr exception() const override { return marker->error(); }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  std::vector<Tensor> result() override { return {}; }

  // Does not block the host: the current streams wait. With a time limit it blocks, as NCCL's does.
  bool wait(std::chrono::milliseconds limit) override {
    if (limit != kNoTimeout) TORCH_CHECK(marker->wait_for(limit), "pccl: not done within ", limit.count(), " ms");
    if (marker->done()) marker->wait();  // throws its error
    for (const auto device : devices) current_queue(device)->await(marker);
    return true;
  }

  const MarkerPointer marker = std::make_shared<Marker>();
  std::vector<DeviceIndex> devices;
};

using GroupWorkPointer = c10::intrusive_ptr<GroupWork>;
using Operation = std::function<c10::intrusive_ptr<c10d::Work>()>;

class Group final : public c10d::Backend {
 public:
  Group(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size)
      : c10d::Backend(rank, size), inner_(std::move(inner)) {}

  ~Group() override { queue_->close(); }

  const std::string getBackendName() const override { return "pccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds limit) override { inner_->setTimeout(limit); }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }

  void startCoalescing() override {
    TORCH_CHECK(!batch_, "pccl: a batch is already open");
    batch_.emplace();
    batch_->work = c10::make_intrusive<GroupWork>(getRank(), c10d::OpType::COALESCED);
  }

  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    TORCH_CHECK(batch_, "pccl: no batch is open");
    Batch batch = std::move(*batch_);
    batch_.reset();
    return start(std::move(batch));
  }

  // Tags are ignored, as NCCL does: messages of a pair match in the order of their calls.
  c10::intrusive_ptr<c10d::Work> send(std::vector<Tensor>& tensors, int target, int) override {
    return add(c10d::OpType::SEND, tensors, [inner = inner_, list = bytes(tensors), target]() mutable {
      return inner->send(list, target, 0);
    });
  }

  c10::intrusive_ptr<c10d::Work> recv(std::vector<Tensor>& tensors, int source, int) override {
    return add(c10d::OpType::RECV, tensors, [inner = inner_, list = bytes(tensors), source]() mutable {
      return inner->recv(list, source, 0);
    });
  }

  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return add(c10d::OpType::BROADCAST, tensors, [inner = inner_, list = bytes(tensors), options]() mutable {
      return inner->broadcast(list, options);
    });
  }

  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, "pccl: all_reduce can only sum");
    return add(c10d::OpType::ALLREDUCE, tensors, [inner = inner_, list = aliases(tensors), options]() mutable {
      return inner->allreduce(list, options);
    });
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    std::vector<Tensor> token{at::empty({1}, at::TensorOptions().device(Device(kType, current_device)))};
    auto work = add(c10d::OpType::BARRIER, token, [inner = inner_] { return inner->barrier(); });
    static_cast<GroupWork&>(*work).marker->wait();  // NCCL's barrier blocks the host, too
    return work;
  }

 private:
  struct Batch {
    GroupWorkPointer work;
    std::vector<MarkerPointer> before;  // where the current streams were at the calls
    std::vector<Operation> operations;
  };

  static void check(const std::vector<Tensor>& tensors) {
    TORCH_CHECK(tensors.size() == 1, "pccl: one tensor at a time");
    TORCH_CHECK(on_device(tensors[0]), "pccl: the tensor must be on a played device, not on ", tensors[0].device());
    TORCH_CHECK(tensors[0].is_contiguous(), "pccl: the tensor must be contiguous");
  }

  static std::vector<Tensor> aliases(const std::vector<Tensor>& tensors) {
    check(tensors);
    return {on_cpu(tensors[0])};
  }

  // Messages are bytes: gloo does not know every dtype.
  static std::vector<Tensor> bytes(const std::vector<Tensor>& tensors) {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    return {aliases(tensors)[0].view(-1).view(at::kByte)};
  }

  c10::intrusive_ptr<c10d::Work> add(c10d::OpType type, const std::vector<Tensor>& tensors, Operation operation) {
    if (batch_) {
      note(*batch_, tensors[0], std::move(operation));
      return batch_->work;
    }
    Batch alone;
    alone.work = c10::make_intrusive<GroupWork>(getRank(), type);
    note(alone, tensors[0], std::move(operation));
    return start(std::move(alone));
  }

  static void note(Batch& batch, const Tensor& tensor, Operation operation) {
    const DeviceIndex device = tensor.device().index();
    auto& devices = batch.work->devices;
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) devices.push_back(device);
    batch.before.push_back(current_queue(device)->mark());
    batch.operations.push_back(std::move(operation));
    // The tensor may be freed by its owner at once; its memory must live until the operation ran.
    registry().with(tensor.storage().data(), [&](Block& block) {
      auto& holds = block.holds;
      holds.erase(std::remove_if(holds.begin(), holds.end(), [](auto& hold) { return hold->done(); }), holds.end());
      holds.push_back(batch.work->marker);
    });
  }

  GroupWorkPointer start(Batch batch) {
    auto work = std::move(batch.work);  // only for the caller: Python may own it
    queue_->push([marker = work->marker, batch = std::move(batch)]() mutable {
      std::exception_ptr error;
      try {
        run(batch.before, batch.operations);
      } catch (...) {
        error = std::current_exception();
      }
      batch.operations.clear();  // lets go of the memory first
      marker->complete(error);
    });
    return work;
  }

  static void run(const std::vector<MarkerPointer>& before, std::vector<Operation>& operations) {
    for (const auto& marker : before) marker->wait();
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (auto& operation : operations) works.push_back(operation());
    for (const auto& work : works) work->wait();
  }

  const c10::intrusive_ptr<c10d::Backend> inner_;
  const QueuePointer queue_ = std::make_shared<Queue>();
  std::optional<Batch> batch_;
};

// ---------------------------------------------------------------------------------------------------------------------
// Python
// ---------------------------------------------------------------------------------------------------------------------

void register_device() {
  c10::SetAllocator(kType, &device_allocator());
  at::setHostAllocator(kType, &pinned_allocator());
  at::RegisterPrivateUse1HooksInterface(const_cast<Hooks*>(&hooks()));
  c10::impl::registerDeviceGuard(kType, new Guard());
  register_cpu_kernels();
}

void set_limit(DeviceIndex index, std::optional<size_t> capacity, std::optional<double> fraction) {
  auto& memory = memory_of(index);
  std::lock_guard<std::mutex> lock(memory.mutex);
  if (capacity) memory.capacity = *capacity;
  if (fraction) memory.fraction = *fraction;
}

// Before the process ends: workers in the middle of a copy would use what the end destroys.
bool settle(int64_t milliseconds) {
  const auto deadline = Clock::now() + std::chrono::milliseconds(milliseconds);
  bool settled = true;
  for (auto& device : queues())
    for (auto& queue : device) settled = queue->drain_until(deadline) && settled;
  return settled;
}

}  // namespace played

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  module.def("register_device", &played::register_device);
  module.def("device_count", [] { return int(played::kDevices); });
  module.def("set_limit", &played::set_limit);
  module.def("set_delay", [](size_t microseconds) { played::delay_microseconds() = microseconds; });
  module.def("pin", &played::pin);
  module.def("unpin", [](uintptr_t address) { played::release_pinned(reinterpret_cast<void*>(address)); });
  module.def("settle", &played::settle, py::call_guard<py::gil_scoped_release>());
  module.def("alias", [](const at::Tensor& tensor) {
    TORCH_CHECK(played::on_device(tensor), "played: not a device tensor");
    return played::on_cpu(tensor);
  });
  module.def("group", [](c10::intrusive_ptr<c10d::Backend> inner, int rank, int size) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<played::Group>(std::move(inner), rank, size));
  });
}
