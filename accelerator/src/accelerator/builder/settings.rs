use core::num::NonZeroUsize;

use accelerator_collective::{GroupOptions, Launch, TransportKind};

use super::{AcceleratorBuilder, GlobalBatch};
use crate::accelerator::{Settings, TraceSettings, variables};
use crate::context::WindowSize;
use crate::core::error::{Error, Kind, Result};
use crate::core::generator::is_drawing;
use crate::reduce::{Compression, GradientReduction, ReduceSettings};
use crate::timeline::Recording;

/// The settings of the program and the variables, once they are known to fit together.
impl AcceleratorBuilder {
    pub(super) fn settings(&self) -> Result<Settings> {
        if is_drawing() {
            return Err(Error::misuse(
                "an accelerator cannot be built within the closure of `Accelerator::init`, whose model \
                 would be drawn from another place of the generator; build it before",
            ));
        }
        variables::check()?;
        accelerator_fault::check()
            .map_err(|error| Error::new(Kind::Config, error.to_string()).with_source(error))?;
        self.loss_scale.check()?;
        if self.bucket_size < 1024 {
            return Err(Error::config(format!(
                "bucket_size is {} bytes; expected at least 1024 (the default is 25 MiB)",
                self.bucket_size
            )));
        }
        let trace = variables::trace(self.trace.as_deref())?;
        let trace_schedule = variables::trace_schedule(self.trace_schedule)?;
        let recording = match (&trace, &trace_schedule) {
            (Some(_), None) => Recording::Events,
            (Some(_), Some(schedule)) => {
                schedule.check()?;
                self.recording
            }
            (None, None) => self.recording,
            (None, Some(schedule)) => {
                return Err(Error::config(format!(
                    "the schedule `{schedule}` was given, and no trace; name its file by `trace` or \
                     ACCEL_TRACE, or leave the schedule out"
                )));
            }
        };
        let compression = variables::compression(self.compression)?;
        if self.hook.is_some() && compression != Compression::None {
            return Err(Error::config(format!(
                "`communication_hook` was called, and the compression is {compression} (by \
                 ACCEL_COMPRESSION or `compression`): a hook decides itself in which type gradients \
                 travel; leave one of them out"
            )));
        }
        let reduction = variables::reduction(self.reduction)?;
        if reduction == GradientReduction::Nccl
            && (self.hook.is_some() || compression == Compression::F16)
        {
            let what = match self.hook {
                Some(_) => "a communication hook, which is given gradients in memory",
                None => "the compression f16, whose range is looked at in memory",
            };
            return Err(Error::config(format!(
                "the reduction `nccl` was asked for (by ACCEL_REDUCTION or `gradient_reduction`), and {what}: ask \
                 for `auto`, or leave the other out"
            )));
        }
        Ok(Settings {
            accumulation_steps: NonZeroUsize::MIN,
            recording,
            reduce: ReduceSettings {
                bucket_size: self.bucket_size,
                check_replicas: self.check_replicas,
                compression,
                hook: self.hook.clone(),
                loss_scale: self.loss_scale,
                on_non_finite_loss: self.on_non_finite_loss,
                overlap: variables::overlap(self.overlap)?,
                precision: variables::precision(self.precision)?,
                reduction,
                same_batches: self.same_batches,
            },
            seed: self.seed,
            trace: TraceSettings {
                path: trace,
                schedule: trace_schedule,
            },
            window: match self.global_batch {
                Some(_) => WindowSize::Samples,
                None => WindowSize::Steps,
            },
        })
    }

    /// Returns the number of micro-steps per step on that many ranks, as the program and the variables set it.
    pub(super) fn steps(&self, world_size: usize) -> Result<NonZeroUsize> {
        let given = self.accumulation_steps.map(|steps| {
            NonZeroUsize::new(steps).ok_or_else(|| {
                Error::config("accumulation_steps is 0; expected at least 1 (no accumulation)")
            })
        });
        let reached = self.global_batch.map(|batch| batch.steps(world_size));
        let asked = match (given.transpose()?, reached.transpose()?) {
            (Some(given), Some(reached)) if given != reached => {
                return Err(Error::config(format!(
                    "accumulation_steps is {given}, and `global_batch` comes to {reached} on \
                     {world_size} ranks; set one of them"
                )));
            }
            (given, reached) => reached.or(given),
        };
        variables::accumulation_steps(asked)
    }

    pub(super) fn group_options(&self, launch: &Launch) -> Result<GroupOptions> {
        match (self.transport, launch.transport) {
            (Some(asked), named)
                if named != TransportKind::Auto
                    && asked != TransportKind::Auto
                    && asked != named =>
            {
                Err(Error::config(format!(
                    "the program asks for the transport `{asked}`, and ACCEL_TRANSPORT for \
                     `{named}`; unset the variable, or leave the choice to it"
                )))
            }
            (Some(asked), _) => Ok(self.options.clone().with_transport(asked)),
            (None, _) => Ok(self.options.clone()),
        }
    }
}

impl GlobalBatch {
    fn steps(self, world_size: usize) -> Result<NonZeroUsize> {
        let Self {
            samples,
            batch_size,
        } = self;
        if batch_size == 0 {
            return Err(Error::config(
                "global_batch was given batches of 0 samples; expected at least 1",
            ));
        }
        let step = world_size.saturating_mul(batch_size);
        if step > 0
            && samples % step == 0
            && let Some(steps) = NonZeroUsize::new(samples / step)
        {
            return Ok(steps);
        }
        let below = samples.checked_div(step).unwrap_or(0) * step;
        let near = match below {
            0 => format!("{step}"),
            _ => format!("{below} or {}", below + step),
        };
        let plural = if world_size == 1 { "" } else { "s" };
        Err(Error::config(format!(
            "a global batch of {samples} samples is no multiple of {world_size} rank{plural} times {batch_size} samples \
             a batch; choose {near}, or another batch size"
        )))
    }
}
