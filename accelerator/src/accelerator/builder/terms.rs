//! The settings that must be the same on all ranks.

use accelerator_collective::Topology;

use crate::accelerator::Settings;
use crate::core::agreement::Term;
use crate::core::device::BackendKind;
use crate::reduce::hook::HookFactory;
use crate::reduce::{DeviceReducer, Overlap, OverlapSwitch};

/// Decides if gradients are sent during backward, on that topology and device.
pub(super) fn overlap_switch(
    topology: &Topology,
    settings: &Settings,
    kind: BackendKind,
) -> OverlapSwitch {
    let on = match settings.reduce.overlap {
        // Hooks run when backward has ended.
        _ if settings.reduce.hook.is_some() => false,
        Overlap::On => topology.world_size() > 1,
        Overlap::Off => false,
        // On one host, ranks compute on the cores that sending would need.
        Overlap::Auto => {
            let computes_elsewhere = kind == BackendKind::Cuda && topology.world_size() > 1;
            topology.local_world_size() < topology.world_size() || computes_elsewhere
        }
    };
    if on {
        OverlapSwitch::On
    } else {
        OverlapSwitch::Off
    }
}

/// Collects the settings that must be the same on all ranks.
pub(super) fn terms(
    settings: &Settings,
    switch: OverlapSwitch,
    topology: &Topology,
    device_reducer: &DeviceReducer,
) -> Vec<Term> {
    let replicas = match settings.reduce.check_replicas {
        Some(steps) => format!("every {steps} steps"),
        None => "never".to_owned(),
    };
    let schedule = match settings.trace.schedule {
        Some(schedule) => schedule.to_string(),
        None => "none".to_owned(),
    };
    vec![
        Term::new(
            "the number of accumulation steps",
            settings.accumulation_steps,
        )
        .set_by("ACCEL_ACCUMULATION_STEPS, `accumulation_steps` or `global_batch`"),
        Term::new("the bucket size in bytes", settings.reduce.bucket_size).set_by("`bucket_size`"),
        Term::new("the compression", settings.reduce.compression)
            .set_by("ACCEL_COMPRESSION or `compression`"),
        // Ranks that ask for it in other words may come to the same.
        Term::new("overlap", switch.name())
            .shown_as(explained(switch, settings, topology, device_reducer.kind()))
            .set_by("ACCEL_OVERLAP or `overlap`"),
        Term::new("the precision", settings.reduce.precision).set_by("ACCEL_PRECISION or `precision`"),
        Term::new("the reduction", settings.reduce.reduction)
            .set_by("ACCEL_REDUCTION or `gradient_reduction`"),
        // What all ranks scale by is found in one way on devices, and in another in memory.
        Term::new("where gradients are summed", device_reducer.placement())
            .shown_as(format!("{} (of `{}`)", device_reducer.placement(), device_reducer.kind()))
            .set_by(
                "the kind of device, ACCEL_REDUCTION and ACCEL_COMPRESSION; ACCEL_REDUCTION=staged on every rank \
                 lets all kinds of devices train together",
            ),
        Term::new("the scale of the loss", settings.reduce.loss_scale).set_by("`loss_scale`"),
        Term::new("a loss that is not finite", settings.reduce.on_non_finite_loss.name())
            .set_by("`stop_at_non_finite_loss`"),
        Term::new("the seed", settings.seed).set_by("`seed`"),
        Term::new("what is recorded", settings.recording)
            .set_by("ACCEL_TRACE, `trace` or `step_summary`"),
        Term::new("the schedule of the trace", schedule)
            .set_by("ACCEL_TRACE_SCHEDULE or `trace_schedule`"),
        Term::new("when replicas are checked", replicas).set_by("`check_replicas_every`"),
    ]
}

/// The hook, which is made to learn its name.
pub(super) fn hook_term(settings: &Settings) -> Term {
    let hook = settings.reduce.hook.as_ref().map(HookFactory::make);
    let name = hook.as_ref().map_or("none", |hook| hook.name());
    Term::new("the communication hook", name).set_by("`communication_hook`")
}

/// Describes the effective setting, with the reason.
fn explained(
    switch: OverlapSwitch,
    settings: &Settings,
    topology: &Topology,
    kind: BackendKind,
) -> String {
    match settings.reduce.overlap {
        _ if settings.reduce.hook.is_some() => {
            format!("{} (by a communication hook)", switch.name())
        }
        Overlap::Auto => format!(
            "{} (`auto`, on the device `{kind}`, with {} of {} ranks on its host)",
            switch.name(),
            topology.local_world_size(),
            topology.world_size()
        ),
        Overlap::Off | Overlap::On => switch.name().to_owned(),
    }
}
