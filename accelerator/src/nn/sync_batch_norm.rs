use core::fmt;
use core::panic::Location;
use std::sync::{Arc, Weak};

use accelerator_collective::{ProcessGroup, ReduceOp};
use burn::module::{Content, DisplaySettings, Flag, Module, ModuleDisplay, Param, RunningState};
use burn::nn::BatchNorm;
use burn::tensor::{DType, Tensor, TensorData};

use crate::accelerator::Accelerator;
use crate::context::Context;
use crate::core::autodiff::{self, Node, NodeContext};
use crate::core::error::{Error, Kind};
use crate::data::batch::Weight;
use crate::unit;

/// Batch normalisation over the batches of all ranks together. In training, mean and variance are those of the global
/// batch, and gradients flow through them to every rank, so the ranks train as one process would with the whole
/// batch.
///
/// Its parameters and running statistics have the names and shapes of Burn's [`BatchNorm`]: files of one
/// load into the other. For evaluation (`model.valid()`), and in a world of one, it computes what that
/// does.
///
/// Each forward in training takes three small all-reduces, each backward two. They run within Burn's
/// backward, in the order of the graph, which must be the same on all ranks; gradients of an accelerator
/// that has such a layer are sent when backward has ended, whatever [`Overlap`](crate::Overlap) says.
///
/// The mean and the variance are computed one after the other, as deviations from the mean of all, in
/// single precision where the input is half. Variances are over n (Ioffe and Szegedy, *Batch Normalization*,
/// 2015); the running variance is over n as well, as in Burn.
///
/// ```
/// use accelerator::nn::SyncBatchNorm;
/// use burn::nn::BatchNormConfig;
/// use burn::tensor::Tensor;
///
/// let outputs = accelerator::launch(2, |accelerator| {
///     let norm = BatchNormConfig::new(1).init(&accelerator.device());
///     let norm = accelerator.prepare(SyncBatchNorm::of(norm, &accelerator))?;
///     // One rank has seen −1 only, the other 1: over both, the mean is 0 and the variance 1.
///     let value = 2.0 * accelerator.rank() as f64 - 1.0;
///     let input = Tensor::<2>::full([4, 1], value, &accelerator.device());
///     let output = norm.forward(input, 4);
///     Ok(output.mean().into_scalar::<f64>())
/// })?;
/// assert!((outputs[0] + 1.0).abs() < 1e-4 && (outputs[1] - 1.0).abs() < 1e-4);
/// # Ok::<(), accelerator::Error>(())
/// ```
#[derive(Debug, Module)]
#[module(custom_display)]
pub struct SyncBatchNorm {
    /// The learnable weight gamma.
    pub gamma: Param<Tensor<1>>,
    /// The learnable bias beta.
    pub beta: Param<Tensor<1>>,
    /// The flag that enables training behaviour for this layer.
    pub training: Param<Flag>,
    /// The running mean.
    pub running_mean: RunningState<Tensor<1>>,
    /// The running variance.
    pub running_var: RunningState<Tensor<1>>,
    /// The share of the running statistics that each step replaces.
    pub momentum: f64,
    /// The number added to the variance.
    pub epsilon: f64,
    #[module(skip)]
    ranks: NormGroup,
}

impl SyncBatchNorm {
    /// Converts one of Burn's layers into a layer over all ranks, with the same running statistics.
    ///
    /// ```
    /// use accelerator::nn::SyncBatchNorm;
    /// use burn::nn::BatchNormConfig;
    ///
    /// # let accelerator = accelerator::Accelerator::new()?;
    /// // One that was loaded or trained as Burn's own.
    /// let norm = BatchNormConfig::new(16).init(&accelerator.device());
    /// let norm = SyncBatchNorm::of(norm, &accelerator);
    /// # assert_eq!(norm.gamma.dims(), [16]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn of(norm: BatchNorm, accelerator: &Accelerator) -> Self {
        accelerator.shared.context.forward_collectives.note();
        Self {
            gamma: norm.gamma,
            beta: norm.beta,
            training: norm.training,
            running_mean: norm.running_mean,
            running_var: norm.running_var,
            momentum: norm.momentum,
            epsilon: norm.epsilon,
            ranks: NormGroup(Arc::downgrade(&accelerator.shared.context)),
        }
    }

    /// Normalises a batch of shape `[rows, features, …]`.
    ///
    /// `weight` is what `backward` will be given for this batch: `&batch`, or a count. Ranks whose gradients
    /// count more have more say in the gradients of the statistics, and an idle batch, or one of weight 0,
    /// has none in either.
    ///
    /// All ranks call it in training. Where one of them is lost, or where a rank is alone, as in
    /// [`on_main_process`](Accelerator::on_main_process), there is nothing to normalise with: every value of
    /// the output is NaN, the running statistics stay as they are, and the error is returned by what comes
    /// next on this rank, be it `backward`, a save, [`Accelerator::valid`], [`reduce`](Accelerator::reduce_metric),
    /// [`gather`](Accelerator::gather) or [`finish`](Accelerator::finish). The same happens in a block that is
    /// [recomputed](super::recompute), on more than one rank. On one rank, evaluate with `model.valid()`.
    ///
    /// # Panics
    ///
    /// Panics if the input has less than two dimensions, or another number of features.
    #[track_caller]
    pub fn forward<const D: usize>(
        &self,
        input: Tensor<D>,
        weight: impl Into<Weight>,
    ) -> Tensor<D> {
        let features = self.gamma.shape().num_elements();
        assert!(
            D >= 2 && input.dims()[1] == features,
            "expected an input of [rows, {features}, …], found {:?}",
            input.dims()
        );
        if !(input.device().is_autodiff() && self.training.is_enabled()) {
            let device = input.device();
            return burn::tensor::module::batch_norm(
                input,
                self.gamma.val(),
                self.beta.val(),
                self.running_mean.value().to_device(&device),
                self.running_var.value().to_device(&device),
                self.epsilon,
            );
        }
        let weight = weight.into().count;
        let shared = self.ranks.0.upgrade();
        let Some(shared) = shared.filter(|shared| shared.group.world_size() > 1) else {
            let normed = burn::tensor::module::batch_norm_train(
                input,
                self.gamma.val(),
                self.beta.val(),
                self.epsilon,
            );
            if weight > 0.0 {
                self.remember(normed.mean.detach(), normed.variance.detach());
            }
            return normed.output;
        };
        if unit::runs_twice() {
            let message = "a `SyncBatchNorm` is in a block that is recomputed, so ranks would normalise together a second \
                           time: move it out of the `Unit`, or set `units` to `keep`";
            shared.forward_collectives.failed(Error::misuse(message));
            return useless(input);
        }
        self.forward_together(input, BatchShare::new(&shared, weight, Location::caller()))
    }

    fn forward_together<const D: usize>(&self, input: Tensor<D>, share: BatchShare) -> Tensor<D> {
        let dims = input.dims();
        let dtype = input.dtype();
        let wide = match dtype {
            DType::F16 | DType::BF16 => input.cast(DType::F32),
            _ => input,
        };
        let features = dims[1];
        let mut along = [1; D];
        along[1] = features;
        let cells = (dims.iter().product::<usize>() / features) as f64;
        // Burn's gradient of a division by a number is exact in single precision only.
        let Some(count) = share.count(cells) else {
            return useless(wide).cast(dtype);
        };
        let each = count.recip();
        // Where nobody has anything, nothing is normalised, and nothing is learnt of it.
        let each = if each.is_finite() { each } else { 0.0 };
        let sums = |values: Tensor<D>| -> Tensor<1> {
            let rows = values.swap_dims(0, 1).reshape([features as i32, -1]);
            rows.sum_dim(1).reshape([features])
        };
        let Some(sum) = share.sum(sums(wide.clone())) else {
            return useless(wide).cast(dtype);
        };
        let mean = sum * each;
        let deviations = wide - mean.clone().reshape(along);
        let Some(sum) = share.sum(sums(deviations.clone() * deviations.clone())) else {
            return useless(deviations).cast(dtype);
        };
        let variance = sum * each;
        if each > 0.0 {
            self.remember(mean.detach(), variance.clone().detach());
        }
        let scale = (variance + self.epsilon).sqrt().recip().reshape(along);
        let gamma = self.gamma.val().cast(deviations.dtype()).reshape(along);
        let beta = self.beta.val().cast(deviations.dtype()).reshape(along);
        (deviations * scale * gamma + beta).cast(dtype)
    }

    fn remember(&self, mean: Tensor<1>, variance: Tensor<1>) {
        for (state, seen) in [(&self.running_mean, mean), (&self.running_var, variance)] {
            let kept = state.value_sync().to_device(&seen.device());
            let seen = seen.cast(kept.dtype());
            let value = kept * (1.0 - self.momentum) + seen * self.momentum;
            state.update(value.detach());
        }
    }
}

impl ModuleDisplay for SyncBatchNorm {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new()
            .with_new_line_after_attribute(false)
            .optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        content
            .add("num_features", &self.beta.shape().num_elements())
            .add("momentum", &self.momentum)
            .add("epsilon", &self.epsilon)
            .optional()
    }
}

/// The ranks that normalise together. A model that outlives its accelerator is alone.
#[derive(Clone)]
struct NormGroup(Weak<Context>);

impl NormGroup {
    fn group(&self) -> Option<ProcessGroup> {
        self.0.upgrade().map(|shared| shared.group.clone())
    }
}

impl fmt::Debug for NormGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let world_size = self.group().map(|group| group.world_size());
        f.debug_tuple("NormGroup").field(&world_size).finish()
    }
}

/// The share of this rank's batch in the global one.
#[derive(Clone, Debug)]
struct BatchShare {
    group: ProcessGroup,
    /// The ranks; their context keeps an error.
    ranks: NormGroup,
    /// The factor by which its gradient will be multiplied.
    weight: f64,
}

impl BatchShare {
    fn new(shared: &Arc<Context>, weight: f64, caller: &'static Location<'static>) -> Self {
        Self {
            // The caller of the forward pass: the backward runs within Burn's.
            group: shared
                .group
                .for_purpose("batch statistics")
                .for_caller(caller),
            ranks: NormGroup(Arc::downgrade(shared)),
            weight,
        }
    }

    fn is_idle(&self) -> bool {
        self.weight <= 0.0
    }

    /// Returns how many values all ranks have for each feature; `None` if that cannot be known.
    fn count(&self, own: f64) -> Option<f64> {
        let mut total = [if self.is_idle() { 0.0 } else { own }];
        self.add_up(&mut total)?;
        Some(total[0])
    }

    /// The sum over all ranks, in rank order and in double precision; `None` if there is none.
    fn sum(&self, own: Tensor<1>) -> Option<Tensor<1>> {
        let values = self.summed(own.clone().inner(), if self.is_idle() { 0.0 } else { 1.0 })?;
        let values = Tensor::<1>::from_inner(values).into_dispatch();
        let back = Arc::new(Self {
            group: self.group.for_purpose("gradients of batch statistics"),
            ..self.clone()
        });
        let summed = autodiff::above(own.into_dispatch(), values, back);
        Some(Tensor::from_dispatch(summed))
    }

    fn summed(&self, own: Tensor<1>, factor: f64) -> Option<Tensor<1>> {
        let (device, dtype) = (own.device(), own.dtype());
        let data = own.into_data();
        let shape = data.shape().clone();
        let mut values: Vec<f64> = match data.convert_dtype(DType::F64).try_to_vec() {
            Ok(values) if factor != 0.0 => values,
            // What an idle rank computed may be anything.
            _ => vec![0.0; shape.num_elements()],
        };
        for value in &mut values {
            *value *= factor;
        }
        self.add_up(&mut values)?;
        let data = TensorData::new(values, shape).convert_dtype(dtype);
        Some(Tensor::from_data(data, (&device, dtype)))
    }

    /// Leaves the sums over all ranks in `values`. Why there are none, what comes next says.
    fn add_up(&self, values: &mut [f64]) -> Option<()> {
        let summed = self.group.all_reduce(values, ReduceOp::Sum);
        if let (Err(error), Some(shared)) = (&summed, self.ranks.0.upgrade()) {
            let advice = match error.is_misuse() {
                true => ", which are not together here; on one rank, use `model.valid()`",
                false => "",
            };
            let message =
                format!("a `SyncBatchNorm` in training normalises over all ranks{advice}: {error}");
            let error = Error::new(Kind::Collective, message).with_source(error.clone());
            shared.forward_collectives.failed(error);
        }
        summed.ok()
    }
}

/// Puts NaN in place of each value, so that nobody takes them for a result.
fn useless<const D: usize>(values: Tensor<D>) -> Tensor<D> {
    values * f64::NAN
}

/// Gives the gradient of the values that this rank has put in for that of the sums.
impl Node for BatchShare {
    /// `backward` multiplies the gradients of each rank by its weight, before they are added up: so
    /// the gradient of the sum over the ranks is weighted here, and this rank's weight taken out.
    fn backward(&self, here: &mut dyn NodeContext) {
        here.hand_on_as(&|gradient| {
            let gradient = Tensor::<1>::from_dispatch(gradient);
            let back = match self.summed(gradient.clone(), self.weight.max(0.0)) {
                None => useless(gradient),
                Some(sum) if self.is_idle() => sum * 0.0,
                Some(sum) => sum / self.weight,
            };
            back.into_dispatch()
        });
    }
}
