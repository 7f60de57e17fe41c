use core::fmt;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::Module;
use burn::optim::ModuleOptimizer;

use crate::accelerator::Accelerator;
use crate::core::agreement::sides;
use crate::core::dyn_module::BoxedModule;
use crate::core::error::{Error, Result};
use crate::core::module;
use crate::data::{AssumeDeterministic, Loader, PreparedLoader};
use crate::optim::{
    Manual, PerEpoch, PerProcess, PreparedOptimizer, RateScaling, ScheduleUnit, Scheduled,
    Scheduler, Sharded, Shards, TrainingPlan, check_types,
};
use crate::reduce;

/// The things that [`Accelerator::prepare`] takes: a module, an optimizer, an optimizer with its scheduler,
/// a data loader, or a tuple of these.
///
/// `K` is always inferred; it exists so that one trait can cover every Burn module and the other types beside them.
///
/// ```
/// use accelerator::{Accelerator, Prepare, Result};
/// use burn::nn::{Linear, LinearConfig};
/// use std::time::Instant;
///
/// fn prepare_timed<K, P: Prepare<K>>(accelerator: &Accelerator, parts: P) -> Result<P::Prepared> {
///     let start = Instant::now();
///     let prepared = accelerator.prepare(parts)?;
///     accelerator.print(format_args!("prepared in {:?}", start.elapsed()));
///     Ok(prepared)
/// }
///
/// let accelerator = Accelerator::new()?;
/// let model: Linear = LinearConfig::new(2, 1).init(&accelerator.device());
/// let model = prepare_timed(&accelerator, model)?;
/// # let _: Linear = model;
/// # Ok::<(), accelerator::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be prepared",
    label = "not a Burn module, optimizer, `(optimizer, scheduler)`, data loader, or tuple of these",
    note = "if it is a tuple, prepare its parts one by one to see which of them it is",
    note = "a scheduler goes beside its optimizer: `prepare((model, (optimizer, scheduler), train))`",
    note = "a module must derive `Module`, the config of an optimizer needs `.init()`, a loader builder needs \
            `.build(dataset)`, and the `Result` of a scheduler's `.init()`, whose error is a `String`, needs `unwrap` or \
            `map_err`",
    note = "if it is a loader of Burn's `DataLoaderBuilder`, import `accelerator::data::LoaderBuilder` in its place, \
            which has the same methods, or write `AssumeDeterministic(loader)` if it reads its batches in the same \
            order on every rank"
)]
pub trait Prepare<K> {
    /// The type that `prepare` returns for it.
    type Prepared;

    /// See [`Accelerator::prepare`].
    ///
    /// # Errors
    ///
    /// See [`Accelerator::prepare`].
    #[track_caller]
    fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared>;

    /// Names its parts, in the order in which they are prepared: ranks compare them before they begin.
    #[doc(hidden)]
    fn kinds(kinds: &mut Vec<String>) {
        kinds.push(core::any::type_name::<Self>().to_owned());
    }
}

#[track_caller]
pub(crate) fn check_kinds<K, P: Prepare<K>>(accelerator: &Accelerator) -> Result<()> {
    if accelerator.world_size() == 1 {
        return Ok(());
    }
    let mut kinds = Vec::new();
    P::kinds(&mut kinds);
    compare_kinds(accelerator, kinds)
}

#[track_caller]
fn compare_kinds(accelerator: &Accelerator, kinds: Vec<String>) -> Result<()> {
    let group = accelerator.group().for_purpose("prepare");
    let all = group.all_gather_object(&kinds)?;
    if all.iter().all(|theirs| *theirs == kinds) {
        return Ok(());
    }
    Err(Error::misuse(format!(
        "prepare: ranks prepare different things ({}); prepare the same parts in the same order on every \
         rank",
        sides(all.iter().map(|kinds| kinds.join(", ")))
    )))
}

// `Display` tells a derived module from a tuple of modules, which is a Burn module as well.
impl<M: Module + fmt::Display + 'static> Prepare<module::Model> for M {
    type Prepared = M;

    fn prepare(self, accelerator: &Accelerator) -> Result<M> {
        let model = BoxedModule::new(self);
        Ok(reduce::prepare(&accelerator.shared.reduction, model)?.into_model())
    }

    fn kinds(kinds: &mut Vec<String>) {
        kinds.push("a model".to_owned());
    }
}

/// A second blanket implementation, of no type: with one alone, rustc reports what Burn's `Module` lacks in place of
/// [`Prepare`]'s note.
#[doc(hidden)]
pub trait Unimplementable {}

impl<T: Unimplementable> Prepare<module::Never> for T {
    type Prepared = T;

    fn prepare(self, _: &Accelerator) -> Result<T> {
        Ok(self)
    }
}

macro_rules! optimizers {
    ($($optimizer:ty, $name:literal;)+) => {
        $(
            impl Prepare<module::Part> for $optimizer {
                type Prepared = PreparedOptimizer<Manual>;

                fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
                    optimizer(accelerator, self, Manual::new(accelerator.is_main_process()))
                }

                fn kinds(kinds: &mut Vec<String>) {
                    kinds.push($name.to_owned());
                }
            }

            scheduled!($optimizer, S, concat!($name, " with a scheduler by step"),
                |scheduler, _world_size| Scheduler::new(scheduler, ScheduleUnit::Step));
            scheduled!($optimizer, PerEpoch<S>, concat!($name, " with a scheduler by epoch"),
                |scheduler, _world_size| Scheduler::new(scheduler.0, ScheduleUnit::EPOCH));
            scheduled!($optimizer, PerProcess<S>, concat!($name, " with a scheduler by process"),
                |scheduler, world_size| Scheduler::new(scheduler.0, ScheduleUnit::Process { world_size }));
        )+
    };
}

macro_rules! scheduled {
    ($optimizer:ty, $schedule:ty, $name:expr, |$scheduler:ident, $world_size:ident| $made:expr) => {
        impl<S: Into<ModuleLrScheduler>> Prepare<module::Part> for ($optimizer, $schedule) {
            type Prepared = PreparedOptimizer<Scheduled>;

            fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
                let (steps, $scheduler) = self;
                let $world_size = accelerator.world_size();
                optimizer(accelerator, steps, Scheduled($made))
            }

            fn kinds(kinds: &mut Vec<String>) {
                kinds.push($name.to_owned());
            }
        }
    };
}

optimizers! {
    ModuleOptimizer, "an optimizer";
    Sharded<ModuleOptimizer>, "a sharded optimizer";
}

impl<O: Send + 'static> Prepare<module::Part> for Loader<O> {
    type Prepared = PreparedLoader<O>;

    fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
        PreparedLoader::sharded(
            &accelerator.shared.context,
            &accelerator.shared.uncounted,
            self,
        )
    }

    fn kinds(kinds: &mut Vec<String>) {
        kinds.push("a loader".to_owned());
    }
}

impl<O: Send + 'static> Prepare<module::Part> for AssumeDeterministic<O> {
    type Prepared = PreparedLoader<O>;

    fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
        PreparedLoader::opaque(
            &accelerator.shared.context,
            &accelerator.shared.uncounted,
            self.0,
        )
    }

    fn kinds(kinds: &mut Vec<String>) {
        kinds.push("a loader of Burn's own".to_owned());
    }
}

macro_rules! tuples {
    ($($part:ident $kind:ident),+) => {
        impl<$($part, $kind),+> Prepare<($($kind,)+)> for ($($part,)+)
        where
            $($part: Prepare<$kind>),+
        {
            type Prepared = ($($part::Prepared,)+);

            #[allow(non_snake_case, reason = "the names are those of the type parameters")]
            fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
                let ($($part,)+) = self;
                Ok(($($part.prepare(accelerator)?,)+))
            }

            fn kinds(kinds: &mut Vec<String>) {
                $($part::kinds(kinds);)+
            }
        }
    };
}

tuples!(A KA);
tuples!(A KA, B KB);
tuples!(A KA, B KB, C KC);
tuples!(A KA, B KB, C KC, D KD);
tuples!(A KA, B KB, C KC, D KD, E KE);
tuples!(A KA, B KB, C KC, D KD, E KE, F KF);
tuples!(A KA, B KB, C KC, D KD, E KE, F KF, G KG);
tuples!(A KA, B KB, C KC, D KD, E KE, F KF, G KG, H KH);

/// An optimizer, with how its state is shared out over the ranks.
trait Steps {
    fn shared_out(self, accelerator: &Accelerator) -> Result<(ModuleOptimizer, Option<Shards>)>;
}

impl Steps for ModuleOptimizer {
    fn shared_out(self, accelerator: &Accelerator) -> Result<(Self, Option<Shards>)> {
        check_state(accelerator, &self)?;
        Ok((self, None))
    }
}

impl Steps for Sharded<ModuleOptimizer> {
    #[track_caller]
    fn shared_out(self, accelerator: &Accelerator) -> Result<(ModuleOptimizer, Option<Shards>)> {
        check_state(accelerator, &self.0)?;
        let context = &accelerator.shared.context;
        context.warn_of_restart("a sharded optimizer");
        Shards::new(accelerator.group(), self.0)
    }
}

/// Refuses state that was loaded in another type than that of its parameter, of a model that is known.
fn check_state(accelerator: &Accelerator, optimizer: &ModuleOptimizer) -> Result<()> {
    let known = |id| accelerator.shared.reduction.models.parameter(id);
    check_types(optimizer, known, &accelerator.shared.context.device)
}

#[track_caller]
fn optimizer<S>(
    accelerator: &Accelerator,
    optimizer: impl Steps,
    schedule: S,
) -> Result<PreparedOptimizer<S>> {
    let optimizer = optimizer.shared_out(accelerator)?;
    let (context, count) = (&accelerator.shared.context, &accelerator.shared.optimizers);
    Ok(PreparedOptimizer::new(optimizer, schedule, context, count))
}

/// The plan of a training.
impl Accelerator {
    /// Plans a training of that many epochs on `loader`.
    ///
    /// A program that [resumes](Self::resume) passes the loader to [`resume_loader`](Self::resume_loader) first:
    /// at another number of ranks, the plan then counts the steps that there will be.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// # use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
    /// # use burn::tensor::Device;
    /// # struct Rows;
    /// # impl Batcher<f32, Vec<f32>> for Rows {
    /// #     fn batch(&self, items: Vec<f32>, _: &Device) -> Vec<f32> { items }
    /// # }
    /// # let dataset = InMemDataset::new(vec![0.5_f32; 100]);
    ///
    /// let accelerator = Accelerator::builder().accumulation_steps(4).build()?;
    /// let train = LoaderBuilder::new(Rows).batch_size(8).build(dataset);
    /// let train = accelerator.prepare(train)?;
    /// let plan = accelerator.plan(&train, 3);
    /// assert_eq!((plan.effective_batch, plan.steps), (Some(32), Some(12)));
    /// assert_eq!(
    ///     plan.to_string(),
    ///     "1 rank, 32 samples a step in 4 micro-steps; 3 epochs of 100 samples in 4 optimizer steps, \
    ///      12 in all"
    /// );
    /// accelerator.print(plan);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn plan<O: Send + 'static>(&self, train: &PreparedLoader<O>, epochs: u64) -> TrainingPlan {
        let accumulation = self.accumulation_steps();
        let micro_steps = train.steps();
        let steps_per_epoch = micro_steps.map(|steps| steps.div_ceil(accumulation as u64));
        train.note_planned();
        let batch = train.global_batch();
        TrainingPlan {
            world_size: self.world_size(),
            accumulation_steps: accumulation,
            samples: train.known_samples(),
            effective_batch: batch.and_then(|samples| samples.checked_mul(accumulation as u64)),
            micro_steps_per_epoch: micro_steps,
            steps_per_epoch,
            epochs,
            steps: steps_per_epoch.and_then(|steps| steps.checked_mul(epochs)),
            rate_steps: None,
        }
    }

    /// Scales a learning rate that was found on one process to the number of ranks.
    ///
    /// With batches of the same size on each rank, a step sees as many times the samples. If the global
    /// batch stays as it was, so does the rate.
    ///
    /// ```
    /// use accelerator::prelude::*;
    ///
    /// let rates = launch(4, |accelerator| {
    ///     let linear = accelerator.scaled_rate(0.1, RateScaling::Linear);
    ///     let root = accelerator.scaled_rate(0.1, RateScaling::Sqrt);
    ///     Ok((linear, root))
    /// })?;
    /// assert_eq!(rates[3], (0.4, 0.2));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn scaled_rate(&self, rate: f64, scaling: RateScaling) -> f64 {
        let ranks = self.world_size() as f64;
        match scaling {
            RateScaling::Linear => rate * ranks,
            RateScaling::Sqrt => rate * ranks.sqrt(),
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::SgdConfig;

    use super::*;

    #[test]
    fn another_order_is_named_on_every_rank_and_the_group_lives() {
        let errors = crate::launch(3, |accelerator| {
            let model = || -> Linear { LinearConfig::new(1, 1).init(&accelerator.device()) };
            let optimizer = || SgdConfig::new().init();
            let error = if accelerator.rank() == 1 {
                accelerator.prepare((optimizer(), model())).map(drop)
            } else {
                accelerator.prepare((model(), optimizer())).map(drop)
            };
            let alone = if accelerator.rank() == 1 {
                accelerator.prepare(model()).map(drop)
            } else {
                accelerator.prepare(Sharded(optimizer())).map(drop)
            };
            accelerator.wait_for_everyone()?;
            Ok([error.unwrap_err(), alone.unwrap_err()])
        })
        .unwrap();
        for [error, alone] in errors {
            assert!(
                error.is_misuse() && alone.is_misuse(),
                "{error:?} {alone:?}"
            );
            let text = error.to_string();
            assert!(
                text.contains("ranks 0, 2: a model, an optimizer; rank 1: an optimizer, a model"),
                "{text}"
            );
            let text = alone.to_string();
            assert!(
                text.contains("ranks 0, 2: a sharded optimizer; rank 1: a model"),
                "{text}"
            );
        }
    }
}
