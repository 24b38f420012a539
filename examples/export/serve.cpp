// Runs an exported equilibrium without Python: serve model.pt2
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <exception>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: serve PACKAGE.pt2\n");
    return 2;
  }
  try {
    c10::InferenceMode guard;
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    for (int64_t batch : {5, 1}) {  // one package serves batches of every size
      std::vector<at::Tensor> inputs = {at::full({batch, 64}, 0.1)};
      // Inputs are not checked: they must have dtype and shape of the export and be contiguous.
      // The outputs come in the order of the program: output, status, steps, residual, evaluations.
      std::vector<at::Tensor> out = model.run(inputs);
      bool converged = out[1].eq(0).all().item<bool>();
      std::printf("batch %d: |z| %.4f, %d evaluations, %s\n", int(batch),
                  out[0].norm().item<float>(), int(out[4].item<int64_t>()),
                  converged ? "all converged" : "not all converged");
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "serve: %s\n", error.what());
    return 1;
  }
}
