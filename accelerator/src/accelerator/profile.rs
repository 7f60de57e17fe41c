use std::path::PathBuf;

use super::Accelerator;
use crate::core::agreement;
use crate::core::error::Result;
use crate::core::outcome;
use crate::timeline::{
    Cycle, Output, Profiler, ProfilerSchedule, StepSummary, check_cycles, clear_traces,
};

/// The time of a step, by its parts.
impl Accelerator {
    /// Returns the times of this rank's steps so far; `None` before the first one, and if the
    /// builder was not [asked](crate::AcceleratorBuilder::step_summary) to record them.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::SgdConfig;
    /// use burn::tensor::Tensor;
    ///
    /// let accelerator = Accelerator::builder().step_summary().build()?;
    /// let device = accelerator.device();
    /// let model: Linear = LinearConfig::new(2, 1).init(&device);
    /// let (mut model, mut optimizer) = accelerator.prepare((model, SgdConfig::new().init()))?;
    /// for _ in 0..3 {
    ///     let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
    ///     let gradients = accelerator.backward(loss, &model, 4)?;
    ///     model = optimizer.step(0.1, model, gradients);
    /// }
    /// let summary = accelerator.step_summary().unwrap();
    /// assert_eq!(summary.steps, 3);
    /// assert!(summary.forward.mean + summary.backward.mean < summary.step.mean);
    /// println!("{summary}");
    /// // That of each rank:
    /// let all = accelerator.gather_object(&summary)?;
    /// # assert_eq!(all, [summary]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn step_summary(&self) -> Option<StepSummary> {
        self.shared.context.timeline.summary()
    }

    /// The [`step_summary`](Self::step_summary) of all ranks: each figure is the mean of the ranks'
    /// own. Every rank must call it.
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost.
    #[track_caller]
    pub fn mean_step_summary(&self) -> Result<Option<StepSummary>> {
        let group = self.shared.context.group.for_purpose("mean_step_summary");
        let all = group.all_gather_object(&self.step_summary())?;
        let mut all = all.into_iter().flatten();
        let Some(mut mean) = all.next() else {
            return Ok(None);
        };
        let mut count = 1.0;
        for mut other in all {
            count += 1.0;
            mean.steps = mean.steps.min(other.steps);
            for (sum, other) in mean.figures_mut().into_iter().zip(other.figures_mut()) {
                sum.mean += other.mean;
                sum.median += other.median;
            }
        }
        for sum in mean.figures_mut() {
            sum.mean /= count;
            sum.median /= count;
        }
        Ok(Some(mean))
    }

    /// Records the steps that the schedule keeps, and writes a trace of all ranks for each of its cycles:
    /// for `trace.json` the files are `trace.cycle0.json`, `trace.cycle1.json` and so on, which
    /// [Perfetto](https://ui.perfetto.dev) opens; see [`trace`](crate::AcceleratorBuilder::trace).
    /// Every rank must call it, with the same schedule. From outside it is asked for by `ACCEL_TRACE` and
    /// `ACCEL_TRACE_SCHEDULE`.
    ///
    /// Steps are optimizer steps, and counted by the library: the loop needs no calls, and the micro-steps of a window
    /// are one step. A loop that steps two optimizers counts two steps in each pass.
    ///
    /// Recording ends with the schedule, with [`finish`](Self::finish), or when the [`Profiler`] is
    /// dropped, which all ranks must do at the same place. What is kept of a cycle that is not complete
    /// then is written as well, if a step was done. The ranks exchange what they have in the
    /// [`backward`](Self::backward) that ends the next window, before it computes, in the next
    /// [`average`](crate::local::LocalTraining::average) of local training, or in `finish`: that time is the
    /// next step's, so let a cycle begin with steps that [wait](ProfilerSchedule::with_wait) or
    /// [warm up](ProfilerSchedule::with_warm_up). Where ranks are lost, each one left writes its own, as
    /// `trace.cycle0.rank3.json`.
    ///
    /// Files of an earlier run under these names are removed at the start, but not in a restart of the
    /// job by the launcher.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use accelerator::timeline::ProfilerSchedule;
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
    ///
    /// let schedule = ProfilerSchedule::new(2).with_skip_first(1).with_wait(1).with_warm_up(1).with_repeat(2);
    /// let profiler = accelerator.profile(schedule, folder.join("trace.json"))?;
    /// for _ in 0..10 {
    ///     let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
    ///     let gradients = accelerator.backward(loss, &model, 4)?;
    ///     model = optimizer.step(0.1, model, gradients);
    /// }
    /// drop(profiler);
    /// accelerator.finish()?;
    /// assert!(folder.join("trace.cycle0.json").is_file());
    /// assert!(folder.join("trace.cycle1.json").is_file());
    /// # assert_eq!(folder.read_dir().unwrap().count(), 2);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// On all ranks alike: [`Error::is_config`](crate::Error::is_config) for a schedule without active steps or that differs between
    /// ranks, or a trace that rank 0 cannot write; [`Error::is_misuse`](crate::Error::is_misuse) while a trace is recorded already;
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost or does not call it. A trace that cannot be
    /// written later is lost with a warning.
    #[track_caller]
    pub fn profile(
        &self,
        schedule: ProfilerSchedule,
        path: impl Into<PathBuf>,
    ) -> Result<Profiler> {
        self.begin_profile(schedule, Output::Trace(path.into()))
    }

    /// Calls `on_ready` with the summary of each cycle on this rank: at the end of the step that completes it, or
    /// where recording [ends](Self::profile) within it after at least one step. Nothing is written. A panic of
    /// `on_ready` ends recording, and is resumed. Otherwise as [`profile`](Self::profile).
    ///
    /// `on_ready` must keep no [`Accelerator`], which would then never be dropped.
    ///
    /// # Errors
    ///
    /// The errors of [`profile`](Self::profile).
    #[track_caller]
    pub fn profile_with(
        &self,
        schedule: ProfilerSchedule,
        on_ready: impl FnMut(&Cycle) + Send + 'static,
    ) -> Result<Profiler> {
        self.begin_profile(schedule, Output::Call(Box::new(on_ready)))
    }

    #[track_caller]
    fn begin_profile(&self, schedule: ProfilerSchedule, output: Output) -> Result<Profiler> {
        let context = &self.shared.context;
        let mut mine = schedule.check().and_then(|()| context.timeline.is_free());
        if let Output::Trace(path) = &output
            && mine.is_ok()
        {
            if self.is_main_process() {
                mine = check_cycles(path);
            }
            if self.is_local_main_process() && self.restarts() == 0 {
                clear_traces(path);
            }
        }
        let told = outcome::exchange(&context.group, mine.as_ref().err(), "begin to profile");
        mine?;
        told?;
        agreement::check(
            &context.group,
            "the schedule of the profiler",
            &schedule.to_string(),
        )?;
        context
            .timeline
            .begin_profile(&context.group, schedule, output)
    }
}
