use super::Accelerator;
use crate::core::agreement;
use crate::core::error::Result;
use crate::timeline::{Cycle, Profiler, ProfilerSchedule, StepSummary, Straggler};

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
        let summary = self.shared.context.timeline.summary()?;
        let stragglers = self.stragglers();
        Some(StepSummary {
            stragglers,
            ..summary
        })
    }

    /// Returns the ranks that slowed down the others, the most frequently slow first. Every rank gets the same list, at
    /// no extra communication. This works with up to 512 ranks, whether or not profiling is on. The main process warns
    /// about a rank that is slow in two consecutive intervals.
    ///
    /// ```
    /// use accelerator::prelude::*;
    ///
    /// # let accelerator = Accelerator::new()?;
    /// // After the training loop:
    /// for straggler in accelerator.stragglers() {
    ///     accelerator.print(straggler);
    /// }
    /// # Ok::<(), Error>(())
    /// ```
    pub fn stragglers(&self) -> Vec<Straggler> {
        self.shared.reduction.pace.stragglers()
    }

    /// Returns the [`step_summary`](Self::step_summary) of all ranks: each figure is the mean over the ranks, and
    /// `steps` the lowest count of any rank. Every rank must call it.
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

    /// Records the steps that the schedule keeps. At the end of each cycle, calls `on_cycle` with this rank's part: a
    /// summary, and a trace to [write](Cycle::write_trace). Every rank must call it with the same schedule.
    /// `ACCEL_TRACE` and `ACCEL_TRACE_SCHEDULE` do the same without a change of the program.
    ///
    /// Steps are optimizer steps, and counted by the library: the loop needs no calls, and the micro-steps of a window
    /// are one step. A loop that steps two optimizers counts two steps in each pass.
    ///
    /// Recording ends with the schedule, with [`finish`](Self::finish), or when the [`Profiler`] is dropped. `on_cycle`
    /// also gets a cycle that is incomplete then, if it has a step. A panic of `on_cycle` ends recording. `on_cycle`
    /// must not own an [`Accelerator`], which would then never be dropped.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use accelerator::timeline::ProfilerSchedule;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::SgdConfig;
    /// use burn::tensor::Tensor;
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("trace.json");
    /// # let traces = folder.path();
    /// let accelerator = Accelerator::new()?;
    /// let device = accelerator.device();
    /// let model: Linear = LinearConfig::new(2, 1).init(&device);
    /// let (mut model, mut optimizer) = accelerator.prepare((model, SgdConfig::new().init()))?;
    ///
    /// let schedule = ProfilerSchedule::new(2).with_skip_first(1).with_wait(1).with_warm_up(1).with_repeat(2);
    /// let profiler = accelerator.profile(schedule, move |cycle| {
    ///     println!("steps from {} on: {}", cycle.first_step, cycle.summary);
    ///     if let Err(error) = cycle.write_trace(&path) {
    ///         eprintln!("{error}");
    ///     }
    /// })?;
    /// for _ in 0..10 {
    ///     let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
    ///     let gradients = accelerator.backward(loss, &model, 4)?;
    ///     model = optimizer.step(0.1, model, gradients);
    /// }
    /// drop(profiler);
    /// assert!(traces.join("trace.cycle0.json").is_file());
    /// assert!(traces.join("trace.cycle1.json").is_file());
    /// # assert_eq!(traces.read_dir().unwrap().count(), 2);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// On all ranks alike: [`Error::is_config`](crate::Error::is_config) for a schedule that has no active steps or
    /// differs between ranks; [`Error::is_misuse`](crate::Error::is_misuse) if a trace is being recorded already;
    /// [`Error::is_collective`](crate::Error::is_collective) if another rank is lost or does not call it.
    #[track_caller]
    pub fn profile(
        &self,
        schedule: ProfilerSchedule,
        on_cycle: impl FnMut(&Cycle) + Send + 'static,
    ) -> Result<Profiler> {
        let context = &self.shared.context;
        let mine = schedule.check().and_then(|()| context.timeline.is_free());
        agreement::together(&context.group, mine, "begin to profile")?;
        agreement::check(
            &context.group,
            "the schedule of the profiler",
            &schedule.to_string(),
        )?;
        context
            .timeline
            .profile(&context.group, schedule, Box::new(on_cycle))
    }
}
