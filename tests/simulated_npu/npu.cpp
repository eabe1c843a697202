// A device named npu in host memory: places, streams, memory, random generators; every operator runs by the CPU's kernel.
// It is as strict as a device: tensors of two places do not mix, its generator is its own, and what Ascend lacks is refused.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "hccl.hpp"

namespace simulated_npu {

constexpr auto kNPU = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 8;
constexpr size_t kAlignment = 64;

thread_local c10::DeviceIndex current = 0;
using Clock = std::chrono::steady_clock;

// ---- places, streams and events: all work is done when a call returns

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kNPU> {
  c10::Device getDevice() const override { return {kNPU, current}; }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no ", device);
    uncheckedSetDevice(device);
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto passed = *static_cast<Clock::time_point*>(second) - *static_cast<Clock::time_point*>(first);
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- memory, counted by device

std::array<std::atomic<int64_t>, kDevices> held{}, peak{};

struct Block {
  void* data;
  int64_t bytes;
  c10::DeviceIndex device;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  held[block->device] -= block->bytes;
  std::free(block->data);
  delete block;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes && posix_memalign(&data, kAlignment, bytes)) throw std::bad_alloc();
    auto now = held[current] += static_cast<int64_t>(bytes);
    if (now > peak[current]) peak[current] = now;
    return {data, new Block{data, static_cast<int64_t>(bytes), current}, &release, c10::Device(kNPU, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} memory;
REGISTER_ALLOCATOR(kNPU, &memory);

// ---- random generators: the CPU's algorithm, another state

struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex index) {
    device_ = c10::Device(kNPU, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static const auto all = [this] {
      std::vector<at::Generator> made;
      for (c10::DeviceIndex i = 0; i < kDevices; ++i) made.push_back(getNewGenerator(i));
      return made;
    }();
    return all.at(index < 0 ? current : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? current : index);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kNPU, current}; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

const Hooks& hooks() {
  static auto* made = new Hooks;
  return *made;
}

// ---- operators

at::Tensor on_host(const at::Tensor& tensor) { // a view of the same memory
  if (!tensor.device().is_privateuseone()) return tensor;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, at::TensorOptions(tensor.dtype()).device(at::kCPU));
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// As torch_npu's ToKernelNpu.cpp: a cast that gives only a type makes float32 of float64.
at::Tensor to_copy(
    const at::Tensor& from, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<at::Device> device,
    std::optional<bool> pinned, bool non_blocking, std::optional<at::MemoryFormat> format) {
  if (dtype == at::kDouble && !device) {
    TORCH_WARN_ONCE("Device do not support double dtype now, dtype cast replace with float.");
    dtype = at::kFloat;
  }
  return at::native::_to_copy(from, dtype, layout, device, pinned, non_blocking, format);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return on_host(tensor).item(); }

// As on a device: operands lie on one place, but for scalars held by the host, and indices where torch allows them.
void require_one_place(const std::string& name, const c10::IValue& value, std::optional<at::Device>& place) {
  if (value.isTensorList() || value.isOptionalTensorList() || value.isList()) {
    for (const c10::IValue& each : value.toListRef()) require_one_place(name, each, place);
  } else if (value.isTensor() && value.toTensor().defined()) {
    const auto& tensor = value.toTensor();
    if (tensor.is_cpu() && (tensor.dim() == 0 || name.find("index") != std::string::npos)) return;
    // few of Ascend's operators take it, and an error comes later than the call
    TORCH_CHECK(tensor.is_cpu() || tensor.scalar_type() != at::kDouble, name, ": float64 on an Ascend");
    if (!place) place = tensor.device();
    TORCH_CHECK(*place == tensor.device(), name, ": tensors on ", *place, " and on ", tensor.device());
  }
}

// Lets the CPU's kernels draw from the generator of a device for a while.
struct Drawing {
  explicit Drawing(at::Generator generator) : ours(std::move(generator)), before(theirs.get_state()) { theirs.set_state(ours.get_state()); }
  ~Drawing() {
    ours.set_state(theirs.get_state());
    theirs.set_state(before);
  }
  at::Generator ours, theirs = at::detail::getDefaultCPUGenerator();
  at::Tensor before;
};

void by_cpu_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.operator_name().name;
  TORCH_CHECK(name.rfind("aten::_fused_adam", 0) && name.rfind("aten::_fused_sgd", 0), name, ": Ascend has no such fused optimizer");
  const auto& arguments = op.schema().arguments();
  const auto first = stack->size() - arguments.size();
  std::optional<at::Device> place;
  at::Generator generator;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    if (value.isGenerator()) {
      generator = value.toGenerator();
      value = c10::IValue();
    } else {
      require_one_place(name, value, place);
    }
  }
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return at::native::cpu_fallback(op, stack);
  Drawing drawing(generator.defined() ? generator : hooks().getDefaultGenerator(place ? place->index() : current));
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  at::RegisterPrivateUse1HooksInterface(const_cast<Hooks*>(&hooks()));
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu_kernel>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("_to_copy", &to_copy);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", TORCH_FN(at::native::resize_));
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  // without this torch would compose it of smaller operators, and round otherwise than the CPU
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&by_cpu_kernel>());
  // and this of a loop over the list, as it does on an Ascend for a factor that is a tensor (op_plugin_functions.yaml)
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames())
    if (op.name.rfind("aten::_foreach_", 0) == 0 && (op.overload_name != "Tensor" || op.name.find("_addc") != std::string::npos))
      m.impl(c10::toString(op).c_str(), torch::CppFunction::makeFromBoxedFunction<&by_cpu_kernel>());
  m.impl("record_stream", +[](at::Tensor&, at::Stream) {});
}

} // namespace simulated_npu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simulated_npu;
  m.def("device_count", [] { return int(kDevices); });
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int index) { Guard().setDevice(c10::Device(kNPU, c10::DeviceIndex(index))); });
  m.def("memory_allocated", [](int index) { return held.at(index).load(); });
  m.def("max_memory_allocated", [](int index) { return peak.at(index).load(); });
  m.def("reset_peak_memory", [](int index) { peak.at(index) = held.at(index).load(); });
  m.def("generator", [](int index) { return hooks().getDefaultGenerator(c10::DeviceIndex(index)); });
  m.def("hccl", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Hccl>(std::move(gloo));
  });
}
