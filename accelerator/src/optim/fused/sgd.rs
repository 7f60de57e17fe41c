use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{Optimizer, RecordState, SgdConfig, StateSink, StateSource, join_path};
use burn::tensor::{Device, Tensor};
use serde::Deserialize;

use super::memory::{Reach, Real, Taken, vectorised};
use super::settings;

/// Burn's [`Sgd`](burn::optim::Sgd) as one pass over memory; see the
/// [module](crate::optim::fused). Made by [`InitFused`](super::InitFused).
#[derive(Clone)]
#[allow(missing_debug_implementations, reason = "Burn's optimizers have none")]
pub struct FusedSgd {
    momentum: Option<Momentum>,
    /// What is added to the gradient, times the parameter.
    penalty: Option<f64>,
}

/// State of [`FusedSgd`]: that of Burn's `Sgd` in records, whose own type cannot be looked into.
#[derive(Clone)]
#[allow(missing_debug_implementations, reason = "Burn's states have none")]
pub struct FusedSgdState<const D: usize> {
    velocity: Option<Tensor<D>>,
}

#[derive(Clone, Copy)]
struct Momentum {
    factor: f64,
    /// Of the gradient.
    share: f64,
    nesterov: bool,
}

#[derive(Deserialize)]
struct Settings {
    weight_decay: Option<WeightDecayConfig>,
    momentum: Option<MomentumConfig>,
}

impl FusedSgd {
    #[expect(
        clippy::expect_used,
        reason = "a test reads every setting of the one version of Burn that this crate depends on"
    )]
    pub(super) fn new(config: &SgdConfig) -> Self {
        let settings: Settings = settings(config).expect("the settings of Burn's SGD");
        Self {
            momentum: settings.momentum.map(|momentum| Momentum {
                // Burn keeps it as `f32`.
                factor: f64::from(momentum.momentum as f32),
                share: 1.0 - momentum.dampening,
                nesterov: momentum.nesterov,
            }),
            penalty: settings.weight_decay.map(|decay| f64::from(decay.penalty)),
        }
    }

    /// As Burn does it, with tensors.
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
        let mut parameters = Taken::<E>::from(tensor);
        let gradients = Taken::<E>::from(grad);
        let (p, g) = (parameters.slice_mut(), gradients.slice());
        let rate = E::of(lr);
        let velocity = match self.penalty {
            Some(penalty) => {
                let penalty = E::of(penalty);
                let pull = move |p: E, g: E| p * penalty + g;
                self.sweep(rate, p, &gradients, velocity, pull)
            }
            None if self.momentum.is_some() => self.sweep(rate, p, &gradients, velocity, |_, g| g),
            None => {
                vectorised(|| p.iter_mut().zip(g).for_each(|(p, g)| *p = *p - *g * rate));
                None
            }
        };
        (parameters.into_tensor(), velocity)
    }

    fn sweep<E: Real, const D: usize>(
        &self,
        rate: E,
        p: &mut [E],
        gradients: &Taken<E>,
        velocity: Option<Tensor<D>>,
        pull: impl Fn(E, E) -> E + Copy,
    ) -> Option<Tensor<D>> {
        let g = gradients.slice();
        let Some(momentum) = self.momentum else {
            vectorised(|| {
                for (p, g) in p.iter_mut().zip(g) {
                    *p = *p - pull(*p, *g) * rate;
                }
            });
            return None;
        };
        let (factor, share) = (E::of(momentum.factor), E::of(momentum.share));
        let velocity = match velocity {
            Some(velocity) => {
                let mut velocity = Taken::<E>::from(velocity);
                let v = velocity.slice_mut();
                let moved = move |g: E, v: E| g * share + v * factor;
                match momentum.nesterov {
                    true => vectorised(|| {
                        glide(rate, p, g, v, pull, moved, |g, v| v * factor + g);
                    }),
                    false => vectorised(|| glide(rate, p, g, v, pull, moved, |_, v| v)),
                }
                velocity
            }
            None => {
                let first = p.iter().zip(g).map(|(&p, &g)| pull(p, g)).collect();
                let mut velocity = Taken::like(gradients, first);
                let v = velocity.slice_mut();
                let still = |_, v| v;
                match momentum.nesterov {
                    true => glide(rate, p, g, v, pull, still, |g, v| v * factor + g),
                    false => glide(rate, p, g, v, pull, still, |_, v| v),
                }
                velocity
            }
        };
        Some(velocity.into_tensor())
    }
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
    for ((p, g), v) in p.iter_mut().zip(g).zip(v) {
        let gradient = pull(*p, *g);
        *v = moved(gradient, *v);
        *p = *p - delta(gradient, *v) * rate;
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
        let velocity = state.and_then(|state| state.velocity);
        let mut tensors = vec![&tensor, &grad];
        tensors.extend(&velocity);
        let (tensor, velocity) = match Reach::of(&tensors) {
            Reach::None => self.step_of_tensors(lr, tensor, grad, velocity),
            Reach::F32 => self.step_in_memory::<f32, D>(lr, tensor, grad, velocity),
            Reach::F64 => self.step_in_memory::<f64, D>(lr, tensor, grad, velocity),
        };
        (tensor, Some(FusedSgdState { velocity }))
    }

    fn to_device<const D: usize>(state: FusedSgdState<D>, device: &Device) -> FusedSgdState<D> {
        FusedSgdState {
            velocity: state.velocity.map(|velocity| velocity.to_device(device)),
        }
    }
}

impl<const D: usize> RecordState for FusedSgdState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        if let Some(velocity) = &self.velocity {
            let path = join_path(prefix, "momentum");
            out.push_tensor(&path, "velocity", velocity.clone().into_data());
        }
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let data = src.take_tensor(&join_path(prefix, "momentum"), "velocity");
        Some(Self {
            velocity: data.map(|data| Tensor::from_data(data, device)),
        })
    }
}
