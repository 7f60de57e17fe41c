use core::num::NonZeroU64;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;

use super::Weighting;
use crate::accelerator::Accelerator;
use crate::core::agreement;
use crate::core::dyn_module::{BoxedModule, DynModule};
use crate::core::error::{Error, Result};
use crate::core::module::visit_floats;
use crate::core::tensor::any_rank;
use crate::data::batch::Weight;
use crate::reduce::{
    AveragedGradients, LocalRound, MeanWeight, MicroStep, ModelState, OpenRoundConcern,
    ReduceScope, sharded,
};

/// The schedule of averages, and the weight of each rank in them: the part that both kinds of local training share.
#[derive(Debug)]
pub(crate) struct SyncRounds {
    pub(super) accelerator: Accelerator,
    concern: OpenRoundConcern,
    /// Gradients that were handed out and not used hold it too.
    handed: Arc<()>,
    period: NonZeroU64,
    weighting: Weighting,
}

/// A local training, which runs in rounds.
pub(crate) trait InRounds {
    fn rounds(&self) -> &SyncRounds;
}

impl SyncRounds {
    /// Compares what the program `said` with the other ranks.
    #[track_caller]
    pub(super) fn new(
        accelerator: &Accelerator,
        period: u64,
        weighting: Weighting,
        concern: OpenRoundConcern,
        said: &str,
    ) -> Result<Self> {
        // Before what one rank refuses: others would wait for it.
        agreement::check(accelerator.group(), "local training", said)?;
        let period = NonZeroU64::new(period).ok_or_else(|| {
            Error::config(
                "local training averages after every 0 steps; expected 1 or more: 1 is after each one",
            )
        })?;
        check_nothing_crosses(accelerator)?;
        if concern == OpenRoundConcern::Apart {
            let context = &accelerator.shared.context;
            context.warn_of_restart("local training");
        }
        Ok(Self {
            accelerator: accelerator.clone(),
            concern,
            handed: Arc::default(),
            period,
            weighting,
        })
    }

    /// Runs the backward pass, and counts the window if that ends it.
    #[track_caller]
    pub(super) fn backward(
        &self,
        loss: Tensor<1>,
        model: &dyn DynModule,
        weight: Weight,
    ) -> Result<AveragedGradients> {
        check_nothing_crosses(&self.accelerator)?;
        if self.accelerator.shared.optimizers.has_only_shards() {
            return Err(sharded());
        }
        let model_state = self.model_state(model)?;
        model_state.round().check_whole()?;
        let steps = model_state.round().steps();
        if steps >= self.period.get() {
            return Err(Error::misuse(format!(
                "{steps} local steps were taken, and parameters are due to be averaged after {}: call \
                 `local.step(&mut model)?` after each step of the optimizer",
                self.period
            )));
        }
        let gradients = self.accelerator.backward_of(
            MicroStep::Loss(loss),
            model,
            weight,
            ReduceScope::Local,
        )?;
        if !gradients.is_accumulating() {
            let samples = gradients.samples().unwrap_or(0.0);
            model_state.round().count(samples, self.concern);
        }
        Ok(gradients.held_by(&self.handed))
    }

    pub(super) fn is_due(&self, model: &dyn DynModule) -> Result<bool> {
        let model_state = self.model_state(model)?;
        let mut round = model_state.round();
        let due = round.steps() >= self.period.get();
        // Where ranks meet, the others hear of it.
        match due {
            true => Ok(true),
            false => round.check_whole().map(|()| false),
        }
    }

    pub(super) fn model_state(&self, model: &dyn DynModule) -> Result<Arc<ModelState>> {
        self.accelerator.shared.reduction.models.find(model)
    }

    /// Returns the weight of this rank in the next average; `None` if no rank took a step.
    #[track_caller]
    pub(super) fn share(&self, model_state: &ModelState) -> Result<Option<MeanWeight>> {
        let round: LocalRound = *model_state.round();
        let obstacle = self.obstacle(model_state);
        let blocked = f64::from(u8::from(obstacle.is_some()));
        let group = self.accelerator.group();
        let trigger = &self.accelerator.shared.reduction.trigger;
        let mine = [
            round.steps() as f64,
            round.samples(),
            blocked,
            trigger.send(group),
        ];
        let all = match group.world_size() {
            1 => mine.to_vec(),
            _ => group.all_gather(&mine)?,
        };
        let each = |number| all.iter().skip(number).step_by(mine.len()).copied();
        trigger.receive(each(3).sum());
        if let Some(error) = obstacle {
            return Err(error);
        }
        if let Some(rank) = each(2).position(|blocked| blocked > 0.0) {
            return Err(Error::misuse(format!(
                "rank {rank} was not ready to average parameters, and its own error says why: make the \
                 same calls on every rank"
            )));
        }
        if each(0).any(|steps| steps != mine[0]) {
            let shown: Vec<_> = (0..)
                .zip(each(0))
                .map(|(rank, steps)| format!("{steps} on rank {rank}"))
                .collect();
            return Err(Error::misuse(format!(
                "ranks average after different numbers of local steps: {}; run the same number of steps \
                 on every rank, idle ones included: batches of a prepared loader do",
                shown.join(", ")
            )));
        }
        if round.steps() == 0 {
            return Ok(None);
        }
        let samples: Vec<f64> = each(1).collect();
        Ok(Some(self.weighting.share(&samples, group.rank())))
    }

    /// Returns why this rank cannot average. All ranks learn of it, since they wait for it.
    fn obstacle(&self, model_state: &ModelState) -> Option<Error> {
        if let Err(error) = model_state.round().check_whole() {
            return Some(error);
        }
        let open = model_state.open_micro_steps();
        if open > 0 {
            return Some(Error::misuse(format!(
                "parameters are averaged between optimizer steps, and {open} micro-steps of the next one \
                 are done: end the window with `trigger_sync`, or average at the end of an epoch"
            )));
        }
        (Arc::strong_count(&self.handed) > 1).then(|| {
            Error::misuse(
                "the gradients of this rank's last backward are not used yet: let the optimizer step \
                 (or drop them) before parameters are averaged",
            )
        })
    }

    /// The model is the same on every rank.
    pub(super) fn close(model_state: &ModelState) {
        *model_state.round() = LocalRound::default();
    }
}

/// Refuses layers that ask other ranks in each forward: these have other parameters, and the gradients of
/// such a layer are made to be averaged over all ranks.
fn check_nothing_crosses(accelerator: &Accelerator) -> Result<()> {
    if accelerator.world_size() == 1 || !accelerator.shared.context.forward_collectives.is_noted() {
        return Ok(());
    }
    Err(Error::misuse(
        "local training steps each rank by itself, and a `SyncBatchNorm` of this accelerator normalises over \
         all ranks in every forward: use Burn's `BatchNorm`, whose statistics are averaged with the \
         parameters, or train with `accelerator.backward`",
    ))
}

impl Weighting {
    /// The share of a rank, where ranks stepped with so many samples. Ranks that count the same count 1:
    /// multiplying by that changes no bit.
    fn share(self, samples: &[f64], rank: usize) -> MeanWeight {
        let alike = samples.iter().all(|count| *count == samples[0]);
        if self == Self::Equal || alike {
            return MeanWeight {
                total: samples.len() as f64,
                weight: 1.0,
            };
        }
        MeanWeight {
            total: samples.iter().sum(),
            weight: samples[rank],
        }
    }
}

/// The values by the numbers of their parameters, on the plain device.
pub(super) fn of(model: &dyn DynModule, model_state: &ModelState) -> Result<Vec<DispatchTensor>> {
    let mut values = vec![None; model_state.parameters().len()];
    visit_floats(model, |float| {
        // A frozen clone may come behind the parameter.
        if let Some(number) = model_state.number(float.id)
            && values[number].is_none()
        {
            let value = any_rank(&float.value).without_autodiff();
            values[number] = Some(value.into_dispatch());
        }
    });
    let values = values.into_iter().zip(model_state.parameters());
    let values = values.map(|(value, known)| {
        value.ok_or_else(|| {
            Error::misuse(format!(
                "there is no parameter `{}` with this model's id where local training looks for it: begin it \
                 with the model that is trained, after `prepare` and `resume`, or resume both",
                known.path
            ))
        })
    });
    values.collect()
}

/// The model with zeros everywhere, for evaluation: also where it is frozen, which may end.
pub(super) fn zeros(model: &dyn DynModule) -> BoxedModule {
    model.boxed().valid().map(&mut ZeroParameters)
}

/// The form of a model: with gradients recorded or not.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum GradientForm {
    Plain,
    Trained,
}

/// The model with other values, which are given by the numbers of their parameters.
pub(super) fn replace(
    model: &dyn DynModule,
    model_state: &ModelState,
    form: GradientForm,
    values: &[DispatchTensor],
) -> BoxedModule {
    let mut writer = LocalWriter {
        model_state,
        form,
        values: values.iter().cloned().map(Some).collect(),
    };
    model_state.tied().retie(model.boxed().map(&mut writer))
}

struct ZeroParameters;

impl ModuleMapper for ZeroParameters {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        Param::from_mapped_value(id, value.zeros_like(), mapper)
    }
}

struct LocalWriter<'a> {
    model_state: &'a ModelState,
    form: GradientForm,
    /// The values that have no place yet.
    values: Vec<Option<DispatchTensor>>,
}

impl ModuleMapper for LocalWriter<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let number = self.model_state.number(param.id);
        let Some(value) = number.and_then(|number| self.values[number].take()) else {
            return param;
        };
        let (id, _, mapper) = param.consume();
        let value = Tensor::<D>::from_dispatch(value);
        let value = match self.form {
            GradientForm::Plain => value,
            GradientForm::Trained => Tensor::from_inner(value).require_grad(),
        };
        Param::from_mapped_value(id, value, mapper)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(weighting: Weighting, samples: &[f64]) -> [f64; 2] {
        let MeanWeight { total, weight } = weighting.share(samples, 1);
        [weight, total]
    }

    #[test]
    fn a_rank_counts_what_it_saw_or_as_any_other() {
        assert_eq!(share(Weighting::Samples, &[6.0, 2.0, 0.0]), [2.0, 8.0]);
        assert_eq!(share(Weighting::Samples, &[7.0, 7.0, 7.0]), [1.0, 3.0]);
        assert_eq!(share(Weighting::Samples, &[0.0, 0.0]), [1.0, 2.0]);
        assert_eq!(share(Weighting::Equal, &[6.0, 2.0, 0.0]), [1.0, 3.0]);
    }
}
