//! Tests in f64, apart since Burn fixes a device's float type once per process.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

#[path = "../common/mod.rs"]
mod common;

mod adapters;
mod fsdp2;
mod huggingface;
mod local_sgd;
mod regroup;
mod sync_batch_norm;
mod trainer;
mod units;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

/// Returns every float parameter in f64.
fn values<M: Module>(model: &M) -> Vec<f64> {
    struct Reader(Vec<f64>);
    impl ModuleVisitor for Reader {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(param.val().into_data().iter::<f64>());
        }
    }
    let mut reader = Reader(Vec::new());
    model.visit(&mut reader);
    reader.0
}
