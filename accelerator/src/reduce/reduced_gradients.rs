//! Reduced gradients with their norms and clips, and the commit of a step with them.

use core::fmt;
use std::sync::{Arc, OnceLock};

use accelerator_collective::ProcessGroup;
use burn::backend::DispatchTensorKind;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, TensorData};

use super::bucket_sums::{self, BucketSums, MeanChange};
use super::element_values::{self, ElementValues as Elements};
use super::loss::{self, OnNonFiniteLoss};
use super::model_state::ModelState;
use super::updates::Clips;
use super::{bucket_storage, device_bucket};
use crate::core::error::{Error, Result};
use crate::core::tensor::{Scalar, from_data, register, with_rank};
use crate::data::ConsumeTicket;
use crate::model::Trainable;
use crate::precision::Finiteness;

/// A rule to clip gradients: see [`AveragedGradients::clip`](crate::AveragedGradients::clip).
///
/// ```
/// use accelerator::Clip;
///
/// // One L2 norm over everything, as `AveragedGradients::clip_norm(1.0)`.
/// let whole = Clip::norm(1.0);
/// // The largest magnitude.
/// let largest = Clip::norm(1.0).of_order(f64::INFINITY);
/// // The head by its own norm, whatever the rest does.
/// let head = Clip::norm(0.1).only(|path| path.starts_with("head."));
/// // Each element by itself.
/// let elements = Clip::value(0.5);
/// # let _ = (whole, largest, head, elements);
/// ```
#[must_use]
pub struct Clip<'a> {
    pub(super) limit: Limit,
    /// Selects parameters by path; `None` is all.
    chosen: Option<Chosen<'a>>,
}

type Chosen<'a> = Box<dyn Fn(&str) -> bool + 'a>;

#[derive(Clone, Copy, Debug)]
pub(super) enum Limit {
    Norm { max: f64, order: f64 },
    Value(f64),
}

impl<'a> Clip<'a> {
    /// Scales gradients by `max / (norm + 1e-6)` if their L2 norm is larger than `max`. A negative `max` counts as 0.
    pub fn norm(max: f64) -> Self {
        Self {
            limit: Limit::Norm { max, order: 2.0 },
            chosen: None,
        }
    }

    /// Clamps elements to `-max..=max`. A negative `max` counts as 0; NaN stays NaN.
    pub fn value(max: f64) -> Self {
        Self {
            limit: Limit::Value(max),
            chosen: None,
        }
    }

    /// Clips by the norm `(Σ |x|ᵖ)^(1/p)` of a positive order instead; with an infinite one, by the largest
    /// magnitude. Has no effect on [`value`](Self::value).
    ///
    /// # Panics
    ///
    /// If `order` is not above 0: there is no such norm.
    pub fn of_order(mut self, order: f64) -> Self {
        assert!(
            order > 0.0,
            "expected an order of norm above 0, found {order}"
        );
        if let Limit::Norm { order: mine, .. } = &mut self.limit {
            *mine = order;
        }
        self
    }

    /// Clips only the parameters whose paths (`layers.0.weight`) `chosen` accepts: the norm is over them, and only
    /// they are scaled. It must choose the same ones on every rank. If it chooses none, nothing is clipped, and a
    /// warning says so.
    pub fn only(mut self, chosen: impl Fn(&str) -> bool + 'a) -> Self {
        self.chosen = Some(Box::new(chosen));
        self
    }

    pub(super) fn covers(&self, path: &str) -> bool {
        self.chosen.as_ref().is_none_or(|chosen| chosen(path))
    }
}

impl fmt::Debug for Clip<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Clip")
            .field("limit", &self.limit)
            .field("some", &self.chosen.is_some())
            .finish()
    }
}

/// The averaged gradients of a window that has ended.
pub(super) struct ReducedGradients {
    pub(super) device: Device,
    pub(super) epoch: Option<u64>,
    /// The mean, once it was read; `None` within where it is not known.
    pub(super) loss: OnceLock<Option<f64>>,
    /// The final factor of each parameter's elements; empty if they stay as they are.
    pub(super) factors: Vec<f64>,
    /// Set if something that all ranks do with them failed here: no step may come of them.
    pub(super) lost: bool,
    /// The norm before clipping.
    pub(super) norm: Option<KnownNorm<Scalar>>,
    /// The sum of the squares of each parameter's elements, before clipping.
    pub(super) squares: Option<KnownNorm<Vec<f64>>>,
    pub(super) model_state: Arc<ModelState>,
    /// The token of gradients of this rank alone, held until they are used.
    pub(super) token: Option<Arc<()>>,
    /// The commit of the step; `None` if no step comes of them.
    pub(super) commit: Option<StepCommit>,
    pub(super) values: GradientStorage,
}

/// The ranks that ask for a norm.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum NormAsked {
    /// All ranks, which get the same bits.
    ByAll,
    /// This rank alone.
    ByOne,
}

/// A norm that was computed, and the ranks that it was computed for.
#[derive(Clone, Debug)]
pub(super) struct KnownNorm<T> {
    pub(super) value: T,
    pub(super) by: NormAsked,
}

pub(super) enum GradientStorage {
    /// Sums over all ranks.
    Sums(BucketSums),
    /// The gradients as Burn made them, of one rank without accumulation.
    Untouched {
        gradients: GradientsParams,
        loss: Option<Tensor<1>>,
        samples: f64,
    },
}

impl ReducedGradients {
    pub(super) fn new(
        model_state: Arc<ModelState>,
        device: Device,
        epoch: Option<u64>,
        tickets: Vec<ConsumeTicket>,
        values: GradientStorage,
    ) -> Self {
        Self {
            device,
            epoch,
            loss: OnceLock::new(),
            factors: Vec::new(),
            lost: false,
            norm: None,
            squares: None,
            token: None,
            commit: Some(StepCommit {
                clips: Clips::default(),
                tickets,
                finiteness: None,
                _pending: model_state.pending_step.clone(),
                model_state: model_state.clone(),
            }),
            model_state,
            values,
        }
    }

    /// Returns the mean loss, once it is computed.
    pub(super) fn read_loss(&self) -> Option<f64> {
        let read = || match &self.values {
            GradientStorage::Sums(sums) => sums.loss.mean(sums.total),
            GradientStorage::Untouched { loss, .. } => {
                let loss = loss.as_ref()?;
                Some(loss.clone().into_scalar::<f64>())
            }
        };
        *self.loss.get_or_init(read)
    }

    /// Reads the loss of this rank alone, and warns of one that is not finite or refuses it.
    pub(super) fn check_loss(&self, rank: usize) -> Result<()> {
        let model_state = &self.model_state;
        let Some(loss) = self.read_loss().filter(|loss| !loss.is_finite()) else {
            return Ok(());
        };
        match model_state.on_non_finite_loss {
            OnNonFiniteLoss::Fail => Err(loss::error(model_state.steps(), [(rank, loss)])),
            OnNonFiniteLoss::Warn => {
                model_state.warn_non_finite_loss(&format!("the loss of rank {rank}"), loss);
                Ok(())
            }
        }
    }

    fn sums(&self) -> Option<&BucketSums> {
        match &self.values {
            GradientStorage::Sums(sums) => Some(sums),
            GradientStorage::Untouched { .. } => None,
        }
    }

    pub(super) fn is_sharded(&self) -> bool {
        self.sums().is_some_and(BucketSums::is_sharded)
    }

    /// Shows the gradients as a step would take them, in path order. If this rank has only a part of them, it shows
    /// none and warns once.
    pub(super) fn read_each(&self, mut read: impl FnMut(&Trainable, TensorData)) {
        match &self.values {
            GradientStorage::Sums(sums) if sums.is_sharded() => self.model_state.warnings.unread(),
            GradientStorage::Sums(sums) => sums.read_each(&self.factors, read),
            GradientStorage::Untouched { gradients, .. } => {
                for (index, parameter) in self.model_state.parameters().iter().enumerate() {
                    if let Some(gradient) = element_values::peek(gradients, parameter) {
                        let factor = bucket_sums::factor(&self.factors, index);
                        let gradient = Tensor::<1>::from_dispatch(gradient);
                        read(
                            parameter,
                            bucket_sums::multiplied(gradient, factor).into_data(),
                        );
                    }
                }
            }
        }
    }

    /// Returns for each parameter whether it is clipped.
    pub(super) fn chosen(&self, clip: &Clip<'_>) -> Vec<bool> {
        let parameters = self.model_state.parameters().iter();
        parameters.map(|known| clip.covers(&known.path)).collect()
    }

    fn factor(&self, parameter: usize) -> Option<f64> {
        self.factors.get(parameter).copied()
    }

    /// Returns the L2 norm of everything, before clipping, if it can be had without the other ranks.
    pub(super) fn norm(&mut self) -> Option<f64> {
        if self.norm.is_none() && self.squares.is_none() && self.is_sharded() {
            self.model_state.note_norm_wanted();
            return None;
        }
        self.whole_norm(NormAsked::ByOne).ok()
    }

    /// Returns the L2 norm of everything, before clipping. If sums are sharded and it is not known, all ranks call it.
    #[track_caller]
    pub(super) fn whole_norm(&mut self, asked: NormAsked) -> Result<f64> {
        // On devices it needs nothing of the window: ranks compare when all of them ask.
        if self.norm_broadcast_group().is_none() {
            self.model_state.note_norm_wanted();
        }
        match &self.norm {
            Some(known) if self.serves(known, asked) => Ok(known.value.read()),
            _ => {
                let value = self.squares(asked)?.iter().sum::<f64>().sqrt();
                self.norm = Some(KnownNorm {
                    value: value.into(),
                    by: asked,
                });
                Ok(value)
            }
        }
    }

    /// The group in which rank 0 broadcasts its norms, if those of the ranks may differ in bits.
    fn norm_broadcast_group(&self) -> Option<&ProcessGroup> {
        self.sums()?.norm_broadcast_group.as_ref()
    }

    fn serves<T>(&self, known: &KnownNorm<T>, asked: NormAsked) -> bool {
        self.norm_broadcast_group().is_none()
            || asked == NormAsked::ByOne
            || known.by == NormAsked::ByAll
    }

    #[track_caller]
    fn squares(&mut self, asked: NormAsked) -> Result<&[f64]> {
        let known = match self.squares.take() {
            Some(known) if self.serves(&known, asked) => known,
            Some(KnownNorm { mut value, .. }) => {
                self.make_alike(&mut value, asked)?;
                KnownNorm { value, by: asked }
            }
            None => {
                let value = self.powers(2.0, |_| true, asked)?;
                KnownNorm { value, by: asked }
            }
        };
        Ok(&self.squares.insert(known).value)
    }

    #[track_caller]
    fn powers(
        &mut self,
        order: f64,
        chosen: impl Fn(usize) -> bool,
        asked: NormAsked,
    ) -> Result<Vec<f64>> {
        let (model_state, device) = (&self.model_state, &self.device);
        let mut powers = self.values.powers(model_state, device, order, chosen)?;
        self.make_alike(&mut powers, asked)?;
        Ok(powers)
    }

    #[track_caller]
    fn make_alike(&self, powers: &mut [f64], asked: NormAsked) -> Result<()> {
        if let (Some(group), NormAsked::ByAll) = (self.norm_broadcast_group(), asked) {
            let measuring = group.for_purpose("the norm of gradients");
            measuring.broadcast(powers, 0)?;
        }
        Ok(())
    }

    /// Returns the norm of what is chosen, as it is now. If sums are sharded, all ranks call it.
    #[track_caller]
    pub(super) fn norm_of(&mut self, order: f64, chosen: &[bool], asked: NormAsked) -> Result<f64> {
        if order == 2.0 {
            let squares = self.squares(asked)?.to_vec();
            let scaled = |(at, square): (usize, f64)| match self.factor(at) {
                _ if !chosen[at] => 0.0,
                Some(factor) => square * factor * factor,
                None => square,
            };
            let sum: f64 = squares.into_iter().enumerate().map(scaled).sum();
            return Ok(sum.sqrt());
        }
        let powers = self.powers(order, |at| chosen[at], asked)?;
        let scaled = powers.into_iter().enumerate().map(|(at, power)| {
            let factor = self.factor(at).unwrap_or(1.0);
            power
                * if order.is_infinite() {
                    factor
                } else {
                    libm::pow(factor, order)
                }
        });
        Ok(if order.is_infinite() {
            scaled.fold(0.0, bucket_storage::larger)
        } else {
            libm::pow(scaled.sum::<f64>(), 1.0 / order)
        })
    }

    /// Scales what is chosen down to the norm `max`, if it is longer. If sums are sharded, all ranks call it.
    #[track_caller]
    pub(super) fn clip_norm(&mut self, max: f64, order: f64, chosen: &[bool]) -> Result<()> {
        if order == 2.0 {
            if self.clip_unread(max, chosen) {
                return Ok(());
            }
            self.whole_norm(NormAsked::ByAll)?;
        }
        let factor = max / (self.norm_of(order, chosen, NormAsked::ByAll)? + 1e-6);
        // Also when the norm is NaN: nothing is hidden then.
        if factor.is_nan() || factor < 1.0 {
            self.multiply(factor, chosen);
        }
        Ok(())
    }

    /// The same without a wait, where the device of one rank alone has everything and nobody has read it.
    fn clip_unread(&mut self, max: f64, chosen: &[bool]) -> bool {
        let is_read = |known: &KnownNorm<Scalar>| known.value.is_read();
        if max.is_nan() || self.squares.is_some() || self.norm.as_ref().is_some_and(is_read) {
            return false;
        }
        let is_first = self.norm.is_none() && self.factors.is_empty();
        if !self.remember_unread() {
            return false;
        }
        self.apply_factors();
        let known = self.norm.as_ref().and_then(|known| known.value.tensor());
        let norm = match known {
            Some(norm) if is_first && chosen.iter().all(|chosen| *chosen) => Some(norm.clone()),
            _ => self.norm_on_device(chosen),
        };
        if let Some(norm) = norm {
            let factor = device_bucket::down_to(max, norm);
            self.scale(&factor, chosen);
        }
        true
    }

    /// Keeps the norm as it is before clipping, to be read when it is asked for; `false` if that takes a wait.
    fn remember_unread(&mut self) -> bool {
        if self.norm_broadcast_group().is_some() || !self.values.is_on_device(&self.model_state) {
            return false;
        }
        if self.norm.is_none() {
            let all = vec![true; self.model_state.parameters().len()];
            let norm = self.norm_on_device(&all).map(Scalar::on_device);
            self.norm = norm.map(|value| KnownNorm {
                value,
                by: NormAsked::ByAll,
            });
        }
        self.norm.is_some()
    }

    /// The L2 norm of what is chosen, without factors, on the device.
    fn norm_on_device(&self, chosen: &[bool]) -> Option<Tensor<1>> {
        match &self.values {
            GradientStorage::Sums(sums) => {
                let norm = device_bucket::norm(&sums.chosen_on_device(chosen))?;
                Some(norm.div_scalar(sums.divisor))
            }
            GradientStorage::Untouched { gradients, .. } => {
                let parameters = self.model_state.parameters().iter().zip(chosen);
                let chosen = parameters.filter(|(_, chosen)| **chosen);
                let there = chosen.filter_map(|(known, _)| element_values::peek(gradients, known));
                let there = there.map(|gradient| {
                    let gradient = Tensor::<1>::from_dispatch(gradient);
                    let elements = gradient.shape().num_elements();
                    gradient.reshape([elements])
                });
                device_bucket::norm(&there.collect::<Vec<_>>())
            }
        }
    }

    /// Multiplies what is chosen by a number of the device.
    fn scale(&mut self, by: &Tensor<1>, chosen: &[bool]) {
        match &mut self.values {
            GradientStorage::Sums(sums) => sums.scale_on_device(by, chosen),
            GradientStorage::Untouched { gradients, .. } => {
                let parameters = self.model_state.parameters().iter().zip(chosen);
                for (parameter, _) in parameters.filter(|(_, chosen)| **chosen) {
                    with_rank!(parameter.shape.len(), D => {
                        if let Some(gradient) = gradients.remove::<D>(parameter.id) {
                            let by = by.clone().cast(gradient.dtype()).reshape([1; D]);
                            gradients.register(parameter.id, gradient.mul(by));
                        }
                    });
                }
            }
        }
    }

    /// Aborts the group if other ranks wait for this one, and lets no step take place.
    pub(super) fn give_up(&mut self, error: &Error) {
        if let Some(sums) = self.sums() {
            sums.give_up(error);
        }
        self.commit = None;
        self.lost = true;
    }

    fn multiply(&mut self, factor: f64, chosen: &[bool]) {
        if self.factors.is_empty() {
            self.factors = vec![1.0; chosen.len()];
        }
        for (mine, chosen) in self.factors.iter_mut().zip(chosen) {
            if *chosen {
                *mine *= factor;
            }
        }
    }

    /// Holds the chosen elements within a range, where they lie. If sums are sharded, all ranks call it.
    #[track_caller]
    pub(super) fn clamp(&mut self, max: f64, chosen: &[bool]) -> Result<()> {
        // It can be had later no more.
        if !self.remember_unread() {
            self.whole_norm(NormAsked::ByAll)?;
        }
        if max.is_nan() {
            self.multiply(max, chosen);
            return Ok(());
        }
        self.apply_factors();
        self.squares = None;
        match &mut self.values {
            GradientStorage::Sums(sums) => sums.change(MeanChange::Clamp { max, chosen }),
            GradientStorage::Untouched { gradients, .. } => {
                for (at, parameter) in self.model_state.parameters().iter().enumerate() {
                    if chosen[at] {
                        element_values::change(gradients, parameter, |gradient| {
                            gradient.clamp(-max, max)
                        });
                    }
                }
            }
        }
        Ok(())
    }

    /// Multiplies now what would be multiplied in the end.
    pub(super) fn apply_factors(&mut self) {
        let factors = core::mem::take(&mut self.factors);
        if factors.is_empty() {
            return;
        }
        self.squares = None;
        match &mut self.values {
            GradientStorage::Sums(sums) => sums.change(MeanChange::Multiply(&factors)),
            GradientStorage::Untouched { gradients, .. } => {
                for (parameter, factor) in self.model_state.parameters().iter().zip(factors) {
                    element_values::change(gradients, parameter, |gradient| {
                        gradient.mul_scalar(factor)
                    });
                }
            }
        }
    }
}

impl GradientStorage {
    /// Returns `true` if all of them are on a device, so that reading waits for it.
    fn is_on_device(&self, model_state: &ModelState) -> bool {
        match self {
            Self::Sums(sums) => sums.is_on_device(),
            Self::Untouched { gradients, .. } => {
                let parameters = model_state.parameters().iter();
                let mut there =
                    parameters.filter_map(|known| element_values::peek(gradients, known));
                there.all(|gradient| !is_in_memory(&gradient.kind))
            }
        }
    }

    /// Returns for each parameter the sum of `|x|^order` of its elements, or the largest magnitude if the order is
    /// infinite; 0 for a parameter that has no gradient, or is not asked for.
    #[track_caller]
    fn powers(
        &mut self,
        model_state: &ModelState,
        device: &Device,
        order: f64,
        asked: impl Fn(usize) -> bool,
    ) -> Result<Vec<f64>> {
        match self {
            Self::Sums(sums) => sums.powers(order, asked),
            Self::Untouched { gradients, .. } => {
                let mut powers = vec![0.0; model_state.parameters().len()];
                let (mut numbers, mut on_device) = (Vec::new(), Vec::new());
                for (at, parameter) in model_state.parameters().iter().enumerate() {
                    if !asked(at) {
                        continue;
                    }
                    if let Some(gradient) = element_values::peek(gradients, parameter)
                        && !is_in_memory(&gradient.kind)
                    {
                        numbers.push(at);
                        on_device.push(Tensor::from_dispatch(gradient));
                        continue;
                    }
                    if let Some(gradient) = element_values::take(gradients, parameter) {
                        // Taken out and put back, the data is nobody else's and not copied.
                        let data = Tensor::<1>::from_dispatch(gradient).into_data();
                        powers[at] = bucket_storage::power_of(Elements::of(&data), order);
                        register(gradients, parameter.id, from_data(data, device));
                    }
                }
                let found = device_bucket::powers(on_device, 1.0, order);
                for (at, power) in numbers.into_iter().zip(found) {
                    powers[at] = power;
                }
                Ok(powers)
            }
        }
    }
}

/// Returns `true` if the CPU reads it in place.
fn is_in_memory(tensor: &DispatchTensorKind) -> bool {
    match tensor {
        #[cfg(feature = "flex")]
        DispatchTensorKind::Flex(_) => true,
        #[cfg(feature = "ndarray")]
        DispatchTensorKind::NdArray(_) => true,
        _ => false,
    }
}

/// The state that advances once a window is done with: an optimizer has stepped with it, the program has taken its
/// gradients, or `backward` has skipped it because they are not finite. Until then, a checkpoint holds neither the step nor
/// its samples. Gradients that the program drops advance nothing.
pub(crate) struct StepCommit {
    pub(super) clips: Clips,
    pub(super) tickets: Vec<ConsumeTicket>,
    /// The finiteness of this window for the scale of losses, if losses are scaled.
    pub(super) finiteness: Option<Finiteness>,
    pub(super) _pending: Arc<()>,
    pub(super) model_state: Arc<ModelState>,
}

impl StepCommit {
    /// Commits the window: its samples are used, its step counts, and the scale of losses moves by it.
    pub(crate) fn commit(self) {
        self.model_state.count_step();
        let model = self.model_state.first_id();
        self.tickets.iter().for_each(|ticket| ticket.commit(model));
        if let Some(finiteness) = self.finiteness {
            self.model_state.update_loss_scale(finiteness);
        }
    }

    /// Notes the update of this rank's replica, the same as on all ranks; without a rate if the program steps by
    /// itself.
    pub(crate) fn note_update(&self, rate: Option<f64>) {
        self.model_state.updates().note(rate, self.clips);
    }
}
