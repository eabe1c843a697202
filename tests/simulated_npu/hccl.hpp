// hccl by gloo: every collective is handed to gloo on CPU views of the same memory.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simulated_npu {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

at::Tensor on_host(const at::Tensor& tensor); // in npu.cpp

inline Tensors on_host(const Tensors& tensors) {
  Tensors views;
  for (const auto& tensor : tensors) views.push_back(on_host(tensor));
  return views;
}

inline std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> views;
  for (const auto& list : lists) views.push_back(on_host(list));
  return views;
}

// Gloo's work, whose future holds the caller's tensors in place of their views.
class HcclWork final : public c10d::Work {
 public:
  HcclWork(WorkPtr work, Tensors results) : work_(std::move(work)), results_(std::move(results)) {}
  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  int sourceRank() const override { return work_->sourceRank(); }
  Tensors result() override { return results_; }
  bool wait(std::chrono::milliseconds timeout) override { return work_->wait(timeout); }
  void synchronize() override { work_->synchronize(); }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::vector<c10::Device> devices;
    if (!results_.empty()) devices.push_back(results_[0].device());
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), devices);
    work_->getFuture()->addCallback([future, results = results_](c10::ivalue::Future& done) {
      if (done.hasError())
        future->setError(done.exception_ptr());
      else
        future->markCompleted(c10::IValue(results));
    });
    return future;
  }

 private:
  WorkPtr work_;
  Tensors results_;
};

class Hccl final : public c10d::Backend {
 public:
  explicit Hccl(c10::intrusive_ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "hccl"; }

// NAME(outputs, inputs, options) of gloo, on views; the work's results are RESULTS
#define SIMULATED_HCCL(NAME, RESULTS, OUT, IN, OPTIONS)                                    \
  WorkPtr NAME(OUT& out, IN& in, const c10d::OPTIONS& options = {}) override {             \
    require_npu(in);                                                                       \
    auto to = on_host(out);                                                                \
    auto from = on_host(in);                                                               \
    return c10::make_intrusive<HcclWork>(gloo_->NAME(to, from, options), results(RESULTS)); \
  }
#define SIMULATED_HCCL_IN_PLACE(NAME, OPTIONS)                                          \
  WorkPtr NAME(Tensors& tensors, const c10d::OPTIONS& options = {}) override {          \
    require_npu(tensors);                                                               \
    auto views = on_host(tensors);                                                      \
    return c10::make_intrusive<HcclWork>(gloo_->NAME(views, options), results(tensors)); \
  }
  SIMULATED_HCCL_IN_PLACE(broadcast, BroadcastOptions)
  SIMULATED_HCCL_IN_PLACE(allreduce, AllreduceOptions)
  SIMULATED_HCCL_IN_PLACE(allreduce_coalesced, AllreduceCoalescedOptions)
  SIMULATED_HCCL_IN_PLACE(reduce, ReduceOptions)
  SIMULATED_HCCL(allgather, out, std::vector<Tensors>, Tensors, AllgatherOptions)
  SIMULATED_HCCL(_allgather_base, out, at::Tensor, at::Tensor, AllgatherOptions)
  SIMULATED_HCCL(allgather_into_tensor_coalesced, out, Tensors, Tensors, AllgatherOptions)
  SIMULATED_HCCL(gather, out, std::vector<Tensors>, Tensors, GatherOptions)
  SIMULATED_HCCL(scatter, out, Tensors, std::vector<Tensors>, ScatterOptions)
  SIMULATED_HCCL(reduce_scatter, out, Tensors, std::vector<Tensors>, ReduceScatterOptions)
  SIMULATED_HCCL(_reduce_scatter_base, out, at::Tensor, at::Tensor, ReduceScatterOptions)
  SIMULATED_HCCL(reduce_scatter_tensor_coalesced, out, Tensors, Tensors, ReduceScatterOptions)
  SIMULATED_HCCL(alltoall, out, Tensors, Tensors, AllToAllOptions)
#undef SIMULATED_HCCL
#undef SIMULATED_HCCL_IN_PLACE

  WorkPtr alltoall_base(
      at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& options = {}) override {
    require_npu(in);
    auto to = on_host(out), from = on_host(in);
    return c10::make_intrusive<HcclWork>(gloo_->alltoall_base(to, from, out_sizes, in_sizes, options), results(out));
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    require_npu(tensors);
    auto views = on_host(tensors);
    return c10::make_intrusive<HcclWork>(gloo_->send(views, to, tag), Tensors{});
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    require_npu(tensors);
    auto views = on_host(tensors);
    return c10::make_intrusive<HcclWork>(gloo_->recv(views, from, tag), tensors);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options = {}) override {
    c10d::BarrierOptions ours;
    ours.timeout = options.timeout;
    return gloo_->barrier(ours);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;

  static Tensors results(const at::Tensor& tensor) { return {tensor}; }
  static Tensors results(const Tensors& tensors) { return tensors; }
  static Tensors results(const std::vector<Tensors>& lists) {
    Tensors all;
    for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
  }
  static void require_npu(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device().is_privateuseone(), "hccl takes tensors of an npu, not of ", tensor.device());
  }
  static void require_npu(const Tensors& tensors) {
    for (const auto& tensor : tensors) require_npu(tensor);
  }
  static void require_npu(const std::vector<Tensors>& lists) {
    for (const auto& list : lists) require_npu(list);
  }
};

} // namespace simulated_npu
