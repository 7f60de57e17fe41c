use burn::backend::DispatchTensor;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::{
    Adam, AdamConfig, AdamState, AdamW, AdamWConfig, AdamWState, AdaptiveMomentumState, Optimizer,
    RecordState, StateSink, StateSource, join_path,
};
use burn::tensor::{Device, Tensor};
use serde::Deserialize;

use super::step::{
    self, KernelInput, Real, THREAD_LENGTH, TakenElements, TensorTemplate, join, saved, settings,
    vectorised,
};
use crate::core::offload::in_file;

/// Defines Burn's `Adam` or `AdamW` as one pass over memory.
macro_rules! fused_adam {
    ($fused:ident, $burn:ident, $state:ident, $config:ident, $settings:ident) => {
        #[derive(Clone)]
        pub(super) struct $fused {
            burn: $burn,
            settings: Option<$settings>,
        }

        impl $fused {
            pub(super) fn new(config: &$config) -> Self {
                Self {
                    burn: config.build(),
                    settings: settings(config),
                }
            }

            #[cfg(test)]
            pub(super) fn is_fused(&self) -> bool {
                self.settings.is_some()
            }
        }

        impl Optimizer for $fused {
            type State<const D: usize> = FusedAdamState<D>;

            fn step<const D: usize>(
                &self,
                lr: f64,
                tensor: Tensor<D>,
                grad: Tensor<D>,
                state: Option<FusedAdamState<D>>,
            ) -> (Tensor<D>, Option<FusedAdamState<D>>) {
                let momentum = state.as_ref().map(|state| &state.momentum);
                match (&self.settings, reach(&tensor, &grad, momentum)) {
                    (None, _) | (_, KernelInput::None) => {
                        let grad = step::gradient(&tensor, grad);
                        let state = state.map(|state| $state::new(state.momentum));
                        let (tensor, state) = self.burn.step(lr, tensor, grad, state);
                        let fused = |state: $state<D>| FusedAdamState {
                            momentum: state.momentum,
                        };
                        (tensor, state.map(fused))
                    }
                    (Some(settings), KernelInput::F32) => {
                        step_any_rank(tensor, grad, state, |tensor, grad, moments| {
                            settings.step::<f32>(lr, tensor, grad, moments)
                        })
                    }
                    (Some(settings), KernelInput::F64) => {
                        step_any_rank(tensor, grad, state, |tensor, grad, moments| {
                            settings.step::<f64>(lr, tensor, grad, moments)
                        })
                    }
                }
            }

            fn to_device<const D: usize>(
                state: FusedAdamState<D>,
                device: &Device,
            ) -> FusedAdamState<D> {
                FusedAdamState {
                    momentum: state.momentum.to_device(device),
                }
            }
        }
    };
}

fused_adam!(FusedAdam, Adam, AdamState, AdamConfig, AdamSettings);
fused_adam!(FusedAdamW, AdamW, AdamWState, AdamWConfig, AdamWSettings);

#[derive(Clone, Deserialize)]
struct AdamSettings {
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    amsgrad: bool,
    weight_decay: Option<WeightDecayConfig>,
}

impl AdamSettings {
    fn step<E: Real>(
        &self,
        lr: f64,
        tensor: DispatchTensor,
        grad: DispatchTensor,
        state: Option<Moments>,
    ) -> (DispatchTensor, Moments) {
        let betas = Betas {
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            amsgrad: self.amsgrad,
        };
        let scalar = |value: f32| E::of(f64::from(value));
        let update = |time: i32| {
            let correction_2 = (1.0 - self.beta_2.powi(time)).sqrt();
            AdamUpdate {
                factor: scalar(correction_2 / (1.0 - self.beta_1.powi(time))),
                epsilon: scalar(self.epsilon * correction_2),
                rate: E::of(lr),
            }
        };
        match &self.weight_decay {
            None => step(betas, tensor, grad, state, update),
            Some(decay) => {
                let penalty = scalar(decay.penalty);
                let rule = |time| AdamDecayed(update(time), penalty);
                step(betas, tensor, grad, state, rule)
            }
        }
    }
}

/// The update of a parameter by its moments.
#[derive(Clone, Copy)]
struct AdamUpdate<E> {
    factor: E,
    epsilon: E,
    rate: E,
}

/// The same, with a penalty on the parameter in the gradient.
#[derive(Clone, Copy)]
struct AdamDecayed<E>(AdamUpdate<E>, E);

impl<E: Real> MomentRule<E> for AdamUpdate<E> {
    #[inline(always)]
    fn update(self, parameter: E, moment_1: E, moment_2: E) -> E {
        parameter - moment_1 * self.factor / (moment_2.root() + self.epsilon) * self.rate
    }
}

impl<E: Real> MomentRule<E> for AdamDecayed<E> {
    #[inline(always)]
    fn gradient(self, parameter: E, gradient: E) -> E {
        parameter * self.1 + gradient
    }

    #[inline(always)]
    fn update(self, parameter: E, moment_1: E, moment_2: E) -> E {
        self.0.update(parameter, moment_1, moment_2)
    }
}

#[derive(Clone, Copy, Deserialize)]
struct AdamWSettings {
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    weight_decay: f32,
    cautious_weight_decay: bool,
    amsgrad: bool,
}

impl AdamWSettings {
    fn step<E: Real>(
        self,
        lr: f64,
        tensor: DispatchTensor,
        grad: DispatchTensor,
        state: Option<Moments>,
    ) -> (DispatchTensor, Moments) {
        let betas = Betas {
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            amsgrad: self.amsgrad,
        };
        let decay_rate = lr * f64::from(self.weight_decay);
        let scalar = |value: f32| E::of(f64::from(value));
        let update = move |time: i32| AdamWUpdate {
            correction_1: scalar(1.0 - self.beta_1.powi(time)),
            correction_2: scalar(1.0 - self.beta_2.powi(time)),
            epsilon: scalar(self.epsilon),
            rate: E::of(lr),
        };
        if decay_rate == 0.0 {
            step(betas, tensor, grad, state, |time| Plain(update(time)))
        } else if self.cautious_weight_decay {
            let rate = E::of(decay_rate);
            let rule = |time| Cautious(update(time), rate);
            step(betas, tensor, grad, state, rule)
        } else {
            let rest = E::of(1.0 - decay_rate);
            let rule = |time| AdamWDecayed(update(time), rest);
            step(betas, tensor, grad, state, rule)
        }
    }
}

#[derive(Clone, Copy)]
struct AdamWUpdate<E> {
    correction_1: E,
    correction_2: E,
    epsilon: E,
    rate: E,
}

impl<E: Real> AdamWUpdate<E> {
    #[inline(always)]
    fn of(self, decayed: E, moment_1: E, moment_2: E) -> E {
        let moment_1 = moment_1 / self.correction_1;
        let moment_2 = moment_2 / self.correction_2;
        decayed - moment_1 / (moment_2.root() + self.epsilon) * self.rate
    }
}

#[derive(Clone, Copy)]
struct Plain<E>(AdamWUpdate<E>);

/// An update with decay, which leaves this share of the parameter.
#[derive(Clone, Copy)]
struct AdamWDecayed<E>(AdamWUpdate<E>, E);

/// An update with this rate of decay, if the decay does not go against the moment.
#[derive(Clone, Copy)]
struct Cautious<E>(AdamWUpdate<E>, E);

impl<E: Real> MomentRule<E> for Plain<E> {
    #[inline(always)]
    fn update(self, parameter: E, moment_1: E, moment_2: E) -> E {
        self.0.of(parameter, moment_1, moment_2)
    }
}

impl<E: Real> MomentRule<E> for AdamWDecayed<E> {
    #[inline(always)]
    fn update(self, parameter: E, moment_1: E, moment_2: E) -> E {
        self.0.of(parameter * self.1, moment_1, moment_2)
    }
}

impl<E: Real> MomentRule<E> for Cautious<E> {
    #[inline(always)]
    fn update(self, parameter: E, moment_1: E, moment_2: E) -> E {
        let differ = (parameter >= E::ZERO) != (moment_1 >= E::ZERO);
        let decay = if differ { E::ZERO } else { parameter * self.1 };
        self.0.of(parameter - decay, moment_1, moment_2)
    }
}

/// State of both: in records that of Burn's `Adam` and `AdamW`. From a record it gets the float type in which it was
/// saved; Burn's own gets that of the default device.
#[derive(Clone)]
pub(super) struct FusedAdamState<const D: usize> {
    momentum: AdaptiveMomentumState<D>,
}

#[derive(Clone, Copy, Debug)]
struct Betas {
    beta_1: f32,
    beta_2: f32,
    amsgrad: bool,
}

/// The formulas in which the optimizers differ, for one element each.
trait MomentRule<E>: Copy + Send + Sync {
    /// The gradient that enters the moments.
    #[inline(always)]
    fn gradient(self, _parameter: E, gradient: E) -> E {
        gradient
    }

    fn update(self, parameter: E, moment_1: E, moment_2: E) -> E;
}

/// An [`AdaptiveMomentumState`] of any rank.
struct Moments {
    time: usize,
    moment_1: DispatchTensor,
    moment_2: DispatchTensor,
    max_moment_2: Option<DispatchTensor>,
}

fn reach<const D: usize>(
    tensor: &Tensor<D>,
    grad: &Tensor<D>,
    state: Option<&AdaptiveMomentumState<D>>,
) -> KernelInput {
    let mut tensors = vec![tensor, grad];
    if let Some(state) = state {
        tensors.extend([&state.moment_1, &state.moment_2]);
        tensors.extend(&state.max_moment_2);
    }
    KernelInput::of(&tensors)
}

/// Runs a step that is compiled once for all ranks.
fn step_any_rank<const D: usize>(
    tensor: Tensor<D>,
    grad: Tensor<D>,
    state: Option<FusedAdamState<D>>,
    step: impl FnOnce(DispatchTensor, DispatchTensor, Option<Moments>) -> (DispatchTensor, Moments),
) -> (Tensor<D>, Option<FusedAdamState<D>>) {
    let moments = state.map(|FusedAdamState { momentum }| Moments {
        time: momentum.time,
        moment_1: momentum.moment_1.into_dispatch(),
        moment_2: momentum.moment_2.into_dispatch(),
        max_moment_2: momentum.max_moment_2.map(Tensor::into_dispatch),
    });
    let (tensor, moments) = step(tensor.into_dispatch(), grad.into_dispatch(), moments);
    let mut momentum = AdaptiveMomentumState::new(
        moments.time,
        Tensor::from_dispatch(moments.moment_1),
        Tensor::from_dispatch(moments.moment_2),
    );
    momentum.max_moment_2 = moments.max_moment_2.map(Tensor::from_dispatch);
    (
        Tensor::from_dispatch(tensor),
        Some(FusedAdamState { momentum }),
    )
}

/// A step of all elements. `rule` is made for the number of the step, from 1.
fn step<E: Real, R: MomentRule<E>>(
    betas: Betas,
    tensor: DispatchTensor,
    grad: DispatchTensor,
    state: Option<Moments>,
    rule: impl FnOnce(i32) -> R,
) -> (DispatchTensor, Moments) {
    let Some(state) = state else {
        return first(betas, tensor, grad, rule(1));
    };
    let time = state.time + 1;
    let rule = rule(time as i32);
    let speed = StepSize::<E>::of(betas);
    let mut moment_1 = TakenElements::<E>::from(state.moment_1);
    let mut moment_2 = TakenElements::<E>::from(state.moment_2);
    let (m, v) = (moment_1.slice_mut(), moment_2.slice_mut());
    let (tensor, max_moment_2) = if betas.amsgrad {
        let is_first = state.max_moment_2.is_none();
        let mut max = match state.max_moment_2 {
            Some(max) => TakenElements::<E>::from(max),
            None => {
                let mould = TensorTemplate::of(&tensor);
                TakenElements::from(mould.cast(vec![E::ZERO; mould.elements()]))
            }
        };
        let highest = max.slice_mut();
        let tensor = step::step(tensor, grad, &mut |p, g, at| {
            let (m, v) = (&mut m[at.clone()], &mut v[at.clone()]);
            let max = &mut highest[at];
            vectorised(
                #[inline(always)]
                || advance(speed, rule, p, g, m, v),
            );
            match is_first {
                true => max.copy_from_slice(v),
                false => raise(max, v),
            }
            vectorised(
                #[inline(always)]
                || update_parameters(rule, p, m, max),
            );
        });
        (tensor, Some(max.into_tensor()))
    } else {
        let tensor = step::step(tensor, grad, &mut |p, g, at| {
            let (m, v) = (&mut m[at.clone()], &mut v[at]);
            sweep_on_threads(speed, rule, p, g, m, v);
        });
        (tensor, state.max_moment_2)
    };
    let moments = Moments {
        time,
        moment_1: moment_1.into_tensor(),
        moment_2: moment_2.into_tensor(),
        max_moment_2,
    };
    (tensor, moments)
}

fn first<E: Real, R: MomentRule<E>>(
    betas: Betas,
    tensor: DispatchTensor,
    grad: DispatchTensor,
    rule: R,
) -> (DispatchTensor, Moments) {
    let speed = StepSize::<E>::of(betas);
    let mould = TensorTemplate::of(&tensor);
    let (mut m, mut v) = (Vec::new(), Vec::new());
    m.reserve_exact(mould.elements());
    v.reserve_exact(mould.elements());
    let tensor = step::step(tensor, grad, &mut |p, g, at| {
        let entering = || p.iter().zip(g).map(|(&p, &g)| rule.gradient(p, g));
        m.extend(entering().map(|g| g * speed.factor_1));
        v.extend(entering().map(|g| g * g * speed.factor_2));
        update_parameters(rule, p, &m[at.clone()], &v[at]);
    });
    let moments = Moments {
        time: 1,
        max_moment_2: betas.amsgrad.then(|| mould.cast(v.clone())),
        moment_1: mould.cast(m),
        moment_2: mould.cast(v),
    };
    (tensor, moments)
}

impl<const D: usize> RecordState for FusedAdamState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        let (prefix, momentum) = (join_path(prefix, MOMENTUM), &self.momentum);
        out.push_scalar(&prefix, "time", momentum.time.into());
        let mut tensor = |leaf, tensor: &Tensor<D>| {
            out.push_tensor(&prefix, leaf, in_file(tensor.clone().into_data()));
        };
        tensor("moment_1", &momentum.moment_1);
        tensor("moment_2", &momentum.moment_2);
        if let Some(max) = &momentum.max_moment_2 {
            tensor("max_moment_2", max);
        }
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let prefix = join_path(prefix, MOMENTUM);
        let time = usize::try_from(src.take_scalar(&prefix, "time")?).ok()?;
        let mut tensor = |leaf| saved(src, &prefix, leaf, device);
        let mut momentum =
            AdaptiveMomentumState::new(time, tensor("moment_1")?, tensor("moment_2")?);
        momentum.max_moment_2 = tensor("max_moment_2");
        Some(Self { momentum })
    }
}

const MOMENTUM: &str = "momentum";

#[derive(Clone, Copy)]
struct StepSize<E> {
    beta_1: E,
    beta_2: E,
    factor_1: E,
    factor_2: E,
}

impl<E: Real> StepSize<E> {
    fn of(betas: Betas) -> Self {
        let scalar = |value: f32| E::of(f64::from(value));
        Self {
            beta_1: scalar(betas.beta_1),
            beta_2: scalar(betas.beta_2),
            factor_1: scalar(1.0 - betas.beta_1),
            factor_2: scalar(1.0 - betas.beta_2),
        }
    }

    #[inline(always)]
    fn moments(self, gradient: E, moment_1: E, moment_2: E) -> (E, E) {
        (
            moment_1 * self.beta_1 + gradient * self.factor_1,
            moment_2 * self.beta_2 + gradient * gradient * self.factor_2,
        )
    }
}

/// Calls [`sweep`], in parallel if there are many elements.
fn sweep_on_threads<E: Real, R: MomentRule<E>>(
    speed: StepSize<E>,
    rule: R,
    p: &mut [E],
    g: &[E],
    m: &mut [E],
    v: &mut [E],
) {
    let len = p.len();
    if len <= THREAD_LENGTH {
        return vectorised(
            #[inline(always)]
            || sweep(speed, rule, p, g, m, v),
        );
    }
    let at = len / 2;
    let (p, g) = (p.split_at_mut(at), g.split_at(at));
    let (m, v) = (m.split_at_mut(at), v.split_at_mut(at));
    join(
        || sweep_on_threads(speed, rule, p.0, g.0, m.0, v.0),
        || sweep_on_threads(speed, rule, p.1, g.1, m.1, v.1),
    );
}

/// Moments and parameters at once.
#[inline(always)]
fn sweep<E: Real, R: MomentRule<E>>(
    speed: StepSize<E>,
    rule: R,
    p: &mut [E],
    g: &[E],
    m: &mut [E],
    v: &mut [E],
) {
    let len = p.len();
    let (g, m, v) = (&g[..len], &mut m[..len], &mut v[..len]);
    for at in 0..len {
        (m[at], v[at]) = speed.moments(rule.gradient(p[at], g[at]), m[at], v[at]);
        p[at] = rule.update(p[at], m[at], v[at]);
    }
}

/// Moments alone.
#[inline(always)]
fn advance<E: Real, R: MomentRule<E>>(
    speed: StepSize<E>,
    rule: R,
    p: &[E],
    g: &[E],
    m: &mut [E],
    v: &mut [E],
) {
    let len = p.len();
    let (g, m, v) = (&g[..len], &mut m[..len], &mut v[..len]);
    for at in 0..len {
        (m[at], v[at]) = speed.moments(rule.gradient(p[at], g[at]), m[at], v[at]);
    }
}

/// Updates parameters, and leaves the moments.
#[inline(always)]
fn update_parameters<E: Real, R: MomentRule<E>>(rule: R, p: &mut [E], m: &[E], v: &[E]) {
    let len = p.len();
    let (m, v) = (&m[..len], &v[..len]);
    for at in 0..len {
        p[at] = rule.update(p[at], m[at], v[at]);
    }
}

/// Raises `max` to `v`, as Burn's `max_pair` does, which keeps what is not less.
fn raise<E: Real>(max: &mut [E], v: &[E]) {
    for (max, v) in max.iter_mut().zip(v) {
        if *max < *v {
            *max = *v;
        }
    }
}
