use core::fmt;
use core::mem::replace;
use std::collections::HashMap;

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, Parameter};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, Int, Tensor};

use crate::core::dyn_module::{BoxedModule, DynModule};
use crate::core::module::ModulePath;
use crate::core::partition::piece_of;
use crate::model::settle_statistics;

/// An exponential moving average of a model's weights. It is smoother than the newest weights, and often better to
/// evaluate and to keep.
///
/// After each step, `average = decay · average + (1 - decay) · weights`, for everything that is trained;
/// frozen parameters, running statistics, and parameters of whole numbers or bools are taken over as they are. Weights are the same on every rank,
/// and so is their average: nothing is communicated. It is saved in checkpoints beside its model, and
/// needs as much memory again as the parameters.
///
/// ```
/// use accelerator::prelude::*;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::SgdConfig;
/// use burn::tensor::Tensor;
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let folder = folder.path();
/// let accelerator = Accelerator::new()?;
/// let device = accelerator.device();
/// let model: Linear = LinearConfig::new(2, 1).init(&device);
/// let (mut model, mut optimizer) = accelerator.prepare((model, SgdConfig::new().init()))?;
/// let mut ema = Ema::new(&model, 0.99);
/// for _ in 0..3 {
///     let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
///     let gradients = accelerator.backward(loss, &model, 4)?;
///     model = optimizer.step(0.1, model, gradients);
///     if let StepOutcome::Stepped { .. } = optimizer.outcome() {
///         ema.update(&model);
///     }
/// }
/// let averaged = ema.model().forward(Tensor::<2>::ones([1, 2], &device.inner()));
/// accelerator.save_state(folder, (&model, &optimizer, &ema))?;
/// # let ((_, _, back), _) = accelerator.resume(folder, (model, optimizer, ema))?;
/// # let device = accelerator.device();
/// # let again = back.model().forward(Tensor::<2>::ones([1, 2], &device.inner()));
/// # assert_eq!(again.into_data(), averaged.into_data());
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
pub struct Ema<M> {
    pub(crate) average: M,
    pub(crate) decay: f64,
}

impl<M: Module + 'static> Ema<M> {
    /// Begins with the weights of `model`, which should be prepared: the average of a model that is not can be used,
    /// but not saved in checkpoints. A `decay` near 1 averages over more steps, about `1 / (1 - decay)` of them. A
    /// `decay` below 0 counts as 0, and above 1 as 1.
    pub fn new(model: &M, decay: f64) -> Self {
        Self {
            average: model.valid(),
            decay: decay.clamp(0.0, 1.0),
        }
    }

    /// Adds the weights of a step to the average. Call it on every rank after each optimizer step that
    /// [moved](crate::optim::StepOutcome::Stepped) the model. Save checkpoints after this call: one that is saved
    /// between a step and its update holds the weights of that step, but an average that never includes them.
    pub fn update(&mut self, model: &M) {
        settle_statistics(model);
        let mut reader = ParameterReader::default();
        (model as &dyn DynModule).visit(&mut reader);
        let mut mixer = Mixer {
            decay: self.decay,
            path: ModulePath::default(),
            weights: reader.weights,
        };
        // Held by nobody else meanwhile, it is updated where it lies.
        let average = BoxedModule::new(replace(&mut self.average, model.clone()));
        self.average = average.map(&mut mixer).into_model();
    }

    /// Returns the model with averaged weights, to evaluate or save. It records no gradients.
    pub fn model(&self) -> &M {
        &self.average
    }
}

impl<M> fmt::Debug for Ema<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ema")
            .field("decay", &self.decay)
            .finish_non_exhaustive()
    }
}

/// Collects what a model holds by path, and whether it is trained. Ids may have changed since the
/// average began, by preparing or resuming.
#[derive(Default)]
struct ParameterReader {
    path: ModulePath,
    weights: HashMap<String, (DispatchTensor, bool)>,
}

impl ModuleVisitor for ParameterReader {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let trained = param.is_require_grad();
        self.keep(param.val().without_autodiff().into_dispatch(), trained);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.keep(param.val().without_autodiff().into_dispatch(), false);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.keep(param.val().without_autodiff().into_dispatch(), false);
    }
}

impl ParameterReader {
    fn keep(&mut self, value: DispatchTensor, trained: bool) {
        let path = self.path.as_str().to_owned();
        self.weights.insert(path, (value, trained));
    }
}

struct Mixer {
    decay: f64,
    path: ModulePath,
    weights: HashMap<String, (DispatchTensor, bool)>,
}

impl ModuleMapper for Mixer {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some((weight, trained)) = self.weights.get(self.path.as_str()) else {
            return param;
        };
        let weight = Tensor::<D>::from_dispatch(weight.clone());
        let (id, average, mapper) = param.consume();
        let mixed = if *trained {
            let mixed = average.mul_scalar(self.decay) + weight.mul_scalar(1.0 - self.decay);
            match piece_of(id).and_then(|piece| piece.offload) {
                Some(offload) => {
                    let device = mixed.device();
                    Tensor::from_data(offload.moved(mixed.into_data()), &device)
                }
                None => mixed,
            }
        } else {
            weight
        };
        Param::from_mapped_value(id, mixed, mapper)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.replace(param)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.replace(param)
    }
}

impl Mixer {
    fn replace<const D: usize, K: Basic>(&self, param: Param<Tensor<D, K>>) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter,
    {
        let Some((value, _)) = self.weights.get(self.path.as_str()) else {
            return param;
        };
        let (id, _, mapper) = param.consume();
        Param::from_mapped_value(id, Tensor::from_dispatch(value.clone()), mapper)
    }
}
