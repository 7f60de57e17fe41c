use crate::core::offload::in_file;
use burn::backend::DispatchTensor;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    Optimizer, RecordState, Sgd, SgdConfig, SgdState, StateSink, StateSource, join_path,
};
use burn::tensor::{Device, Tensor};
use serde::Deserialize;

use super::step::{
    self, KernelInput, Real, TakenElements, TensorTemplate, saved, settings, vectorised,
};

/// Burn's [`Sgd`] as one pass over memory.
#[derive(Clone)]
pub(super) struct FusedSgd {
    burn: Sgd,
    settings: Option<SgdStep>,
}

#[derive(Clone, Copy)]
struct SgdStep {
    momentum: Option<Momentum>,
    /// The factor of the parameter in the weight decay that is added to the gradient.
    penalty: Option<f64>,
}

/// State of [`FusedSgd`]: that of Burn's `Sgd` in records, whose own type cannot be looked into. From a record it
/// gets the float type in which it was saved.
#[derive(Clone)]
pub(super) struct FusedSgdState<const D: usize> {
    velocity: Option<Tensor<D>>,
    /// Burn's own state, in place of `velocity`, if Burn's optimizer steps.
    burn: Option<SgdState<D>>,
}

#[derive(Clone, Copy)]
struct Momentum {
    factor: f64,
    share: f64,
    nesterov: bool,
}

#[derive(Deserialize)]
struct SgdSettings {
    weight_decay: Option<WeightDecayConfig>,
    momentum: Option<MomentumConfig>,
}

impl FusedSgd {
    pub(super) fn new(config: &SgdConfig) -> Self {
        let settled = |settings: SgdSettings| SgdStep {
            momentum: settings.momentum.map(|momentum| Momentum {
                // Burn keeps it as `f32`.
                factor: f64::from(momentum.momentum as f32),
                share: 1.0 - momentum.dampening,
                nesterov: momentum.nesterov,
            }),
            penalty: settings.weight_decay.map(|decay| f64::from(decay.penalty)),
        };
        Self {
            burn: config.build(),
            settings: settings(config).map(settled),
        }
    }

    #[cfg(test)]
    pub(super) fn is_fused(&self) -> bool {
        self.settings.is_some()
    }

    /// Builds an optimizer as for a configuration that serde cannot read.
    #[cfg(test)]
    pub(super) fn unread(config: &SgdConfig) -> Self {
        Self {
            settings: None,
            ..Self::new(config)
        }
    }

    /// Steps by Burn's own optimizer, whose state is of another type.
    fn step_of_burn<const D: usize>(
        &self,
        lr: f64,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<FusedSgdState<D>>,
    ) -> (Tensor<D>, Option<FusedSgdState<D>>) {
        let device = tensor.device();
        let state = state.and_then(|state| state.into_burn(&device));
        let (tensor, state) = self.burn.step(lr, tensor, grad, state);
        let state = state.map(|state| FusedSgdState {
            velocity: None,
            burn: Some(state),
        });
        (tensor, state)
    }
}

impl SgdStep {
    /// Steps with tensor operations, as Burn does.
    fn step_of_tensors<const D: usize>(
        &self,
        lr: f64,
        tensor: Tensor<D>,
        mut grad: Tensor<D>,
        velocity: Option<Tensor<D>>,
    ) -> (Tensor<D>, Option<Tensor<D>>) {
        if let Some(penalty) = self.penalty {
            grad = tensor.clone().mul_scalar(penalty).add(grad);
        }
        let mut next = None;
        if let Some(momentum) = self.momentum {
            let velocity = match velocity {
                Some(velocity) => {
                    let kept = velocity.mul_scalar(momentum.factor);
                    grad.clone().mul_scalar(momentum.share).add(kept)
                }
                None => grad.clone(),
            };
            grad = match momentum.nesterov {
                true => velocity.clone().mul_scalar(momentum.factor).add(grad),
                false => velocity.clone(),
            };
            next = Some(velocity);
        }
        (tensor - grad.mul_scalar(lr), next)
    }

    fn step_in_memory<E: Real, const D: usize>(
        &self,
        lr: f64,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        velocity: Option<Tensor<D>>,
    ) -> (Tensor<D>, Option<Tensor<D>>) {
        let velocity = velocity.map(Tensor::into_dispatch);
        let (tensor, grad) = (tensor.into_dispatch(), grad.into_dispatch());
        let (tensor, velocity) = self.step_any_rank(E::of(lr), tensor, grad, velocity);
        (
            Tensor::from_dispatch(tensor),
            velocity.map(Tensor::from_dispatch),
        )
    }

    /// Compiled once, not once per rank.
    fn step_any_rank<E: Real>(
        &self,
        rate: E,
        tensor: DispatchTensor,
        grad: DispatchTensor,
        velocity: Option<DispatchTensor>,
    ) -> (DispatchTensor, Option<DispatchTensor>) {
        match (self.penalty, self.momentum) {
            (Some(penalty), momentum) => {
                let penalty = E::of(penalty);
                let pull = move |p: E, g: E| p * penalty + g;
                match momentum {
                    Some(momentum) => momentum.sweep(rate, tensor, grad, velocity, pull),
                    None => (slide(rate, tensor, grad, pull), None),
                }
            }
            (None, Some(momentum)) => momentum.sweep(rate, tensor, grad, velocity, |_, g| g),
            (None, None) => (slide(rate, tensor, grad, |_, g| g), None),
        }
    }
}

impl Momentum {
    fn sweep<E: Real>(
        self,
        rate: E,
        tensor: DispatchTensor,
        grad: DispatchTensor,
        velocity: Option<DispatchTensor>,
        pull: impl Fn(E, E) -> E + Copy,
    ) -> (DispatchTensor, Option<DispatchTensor>) {
        let (factor, share) = (E::of(self.factor), E::of(self.share));
        let ahead = move |g: E, v: E| v * factor + g;
        let Some(velocity) = velocity else {
            let mould = TensorTemplate::of(&tensor);
            let mut all: Vec<E> = Vec::new();
            all.reserve_exact(mould.elements());
            let tensor = step::step(tensor, grad, &mut |p, g, at| {
                all.extend(p.iter().zip(g).map(|(&p, &g)| pull(p, g)));
                let v = &mut all[at];
                let still = |_, v| v;
                match self.nesterov {
                    true => glide(rate, p, g, v, pull, still, ahead),
                    false => glide(rate, p, g, v, pull, still, |_, v| v),
                }
            });
            return (tensor, Some(mould.cast(all)));
        };
        let mut velocity = TakenElements::<E>::from(velocity);
        let all = velocity.slice_mut();
        let moved = move |g: E, v: E| g * share + v * factor;
        let tensor = step::step(tensor, grad, &mut |p, g, at| {
            let v = &mut all[at];
            match self.nesterov {
                true => vectorised(
                    #[inline(always)]
                    || glide(rate, p, g, v, pull, moved, ahead),
                ),
                false => vectorised(
                    #[inline(always)]
                    || glide(rate, p, g, v, pull, moved, |_, v| v),
                ),
            }
        });
        (tensor, Some(velocity.into_tensor()))
    }
}

/// Parameters alone.
fn slide<E: Real>(
    rate: E,
    tensor: DispatchTensor,
    grad: DispatchTensor,
    pull: impl Fn(E, E) -> E + Copy,
) -> DispatchTensor {
    step::step(tensor, grad, &mut |p, g, _| {
        vectorised(
            #[inline(always)]
            || {
                let g = &g[..p.len()];
                for at in 0..p.len() {
                    p[at] = p[at] - pull(p[at], g[at]) * rate;
                }
            },
        );
    })
}

/// Velocities and parameters at once.
#[inline(always)]
fn glide<E: Real>(
    rate: E,
    p: &mut [E],
    g: &[E],
    v: &mut [E],
    pull: impl Fn(E, E) -> E,
    moved: impl Fn(E, E) -> E,
    delta: impl Fn(E, E) -> E,
) {
    let len = p.len();
    let (g, v) = (&g[..len], &mut v[..len]);
    for at in 0..len {
        let gradient = pull(p[at], g[at]);
        v[at] = moved(gradient, v[at]);
        p[at] = p[at] - delta(gradient, v[at]) * rate;
    }
}

impl Optimizer for FusedSgd {
    type State<const D: usize> = FusedSgdState<D>;

    fn step<const D: usize>(
        &self,
        lr: f64,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<FusedSgdState<D>>,
    ) -> (Tensor<D>, Option<FusedSgdState<D>>) {
        let Some(settings) = self.settings else {
            let grad = step::gradient(&tensor, grad);
            return self.step_of_burn(lr, tensor, grad, state);
        };
        let velocity = state.and_then(|state| state.velocity);
        let mut tensors = vec![&tensor, &grad];
        tensors.extend(&velocity);
        let (tensor, velocity) = match KernelInput::of(&tensors) {
            KernelInput::None => {
                let grad = step::gradient(&tensor, grad);
                settings.step_of_tensors(lr, tensor, grad, velocity)
            }
            KernelInput::F32 => settings.step_in_memory::<f32, D>(lr, tensor, grad, velocity),
            KernelInput::F64 => settings.step_in_memory::<f64, D>(lr, tensor, grad, velocity),
        };
        let state = FusedSgdState {
            velocity,
            burn: None,
        };
        (tensor, Some(state))
    }

    fn to_device<const D: usize>(state: FusedSgdState<D>, device: &Device) -> FusedSgdState<D> {
        FusedSgdState {
            velocity: state.velocity.map(|velocity| velocity.to_device(device)),
            burn: state.burn.map(|burn| Sgd::to_device(burn, device)),
        }
    }
}

impl<const D: usize> FusedSgdState<D> {
    /// Converts it to Burn's state; state that was loaded from a record is not in this form yet.
    fn into_burn(self, device: &Device) -> Option<SgdState<D>> {
        if self.burn.is_some() {
            return self.burn;
        }
        let mut sink = StateSink::default();
        self.state_flatten("", &mut sink);
        let mut source = StateSource::new(sink.scalars.into_iter().collect());
        for (name, data) in sink.tensors {
            source.insert_tensor(name, data);
        }
        SgdState::state_unflatten("", &mut source, device)
    }
}

impl<const D: usize> RecordState for FusedSgdState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        if let Some(burn) = &self.burn {
            return burn.state_flatten(prefix, out);
        }
        if let Some(velocity) = &self.velocity {
            let path = join_path(prefix, "momentum");
            out.push_tensor(&path, "velocity", in_file(velocity.clone().into_data()));
        }
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        Some(Self {
            velocity: saved(src, &join_path(prefix, "momentum"), "velocity", device),
            burn: None,
        })
    }
}
