//! Burn's Adam, AdamW and SGD as one pass over memory.
//!
//! Burn writes an optimizer as a chain of tensor operations. On the CPU each of them reads and writes
//! all elements, so a step of AdamW goes through memory some fifteen times. Here it is one loop, in
//! place: the same operations in the same order for each element, and so the same bits. After an all-reduce it
//! reads the sums of gradients where they lie, which Burn's own get divided and copied.
//!
//! An optimizer from [`InitFused::init_fused`] is a [`ModuleOptimizer`] like any other: it takes
//! groups and gradient clipping, and its records are Burn's, so either optimizer continues from what
//! the other one has saved. It loads state in the float type in which that was saved, where Burn's own takes that of
//! the default device: parameters of another type continue with fused optimizers alone. On other devices than `flex`, and for other types than `f32` and
//! `f64`, it runs Burn's own operations.
//!
//! ```
//! use accelerator::prelude::*;
//! use accelerator::optim::InitFused;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::{AdamWConfig, ModuleOptimizer};
//! use burn::tensor::Tensor;
//!
//! let train = |optimizer: ModuleOptimizer| {
//!     let accelerator = Accelerator::new()?;
//!     let device = accelerator.device();
//!     let model: Linear = accelerator.init(|device| LinearConfig::new(3, 2).init(device));
//!     let (mut model, mut optimizer) = accelerator.prepare((model, optimizer))?;
//!     for _ in 0..5 {
//!         let loss = model.forward(Tensor::<2>::ones([4, 3], &device)).powi_scalar(2).mean();
//!         let gradients = accelerator.backward(loss, &model, 4)?;
//!         model = optimizer.step(1e-2, model, gradients);
//!     }
//!     Ok::<_, Error>(model.weight.val().into_data())
//! };
//! let config = AdamWConfig::new().with_weight_decay(0.1);
//! assert_eq!(train(config.init_fused())?, train(config.init())?, "bit for bit");
//! # Ok::<(), Error>(())
//! ```

mod adam;
mod sgd;
pub(super) mod step;

#[cfg(test)]
mod tests;

use burn::optim::{AdamConfig, AdamWConfig, ModuleOptimizer, Optimizer, SgdConfig};

use self::adam::{FusedAdam, FusedAdamW};
use self::sgd::FusedSgd;

/// Configurations of Burn's optimizers that have a fused form: see the
/// [module](crate::optim::fused).
///
/// ```
/// use accelerator::optim::InitFused;
/// use burn::module::ParamGroup;
/// use burn::optim::{AdamWConfig, SgdConfig};
///
/// let optimizer = AdamWConfig::new().init_fused();
/// // Biases by another one.
/// let biases = ParamGroup::from_predicate("bias");
/// let optimizer = optimizer.with_group(biases, SgdConfig::new().build_fused(), None);
/// # let _ = optimizer;
/// ```
pub trait InitFused {
    /// Builds the bare optimizer, as Burn's `build` does, for
    /// [`ModuleOptimizer::with_group`], without the configured gradient clipping.
    fn build_fused(&self) -> impl Optimizer + use<Self>;

    /// Builds an optimizer for modules, as Burn's `init` does, with the configured gradient clipping.
    fn init_fused(&self) -> ModuleOptimizer;
}

macro_rules! init_fused {
    ($($config:ty => $fused:ty),+) => {
        $(
            impl InitFused for $config {
                fn build_fused(&self) -> impl Optimizer + use<> {
                    <$fused>::new(self)
                }

                fn init_fused(&self) -> ModuleOptimizer {
                    let fused = ModuleOptimizer::from(self.build_fused());
                    match self.init().grad_clipping() {
                        Some(clipping) => fused.with_grad_clipping(clipping.clone()),
                        None => fused,
                    }
                }
            }
        )+
    };
}

init_fused!(AdamConfig => FusedAdam, AdamWConfig => FusedAdamW, SgdConfig => FusedSgd);
