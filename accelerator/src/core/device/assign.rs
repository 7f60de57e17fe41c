//! The choice of a rank's device among those of its host.

use accelerator_collective::Topology;

use crate::core::device::BackendKind;
use crate::core::error::{Error, Kind, Result};
use crate::core::user_message;

/// The choice whether ranks of a host may share its GPUs if there are more ranks than GPUs.
///
/// A shared GPU computes for one rank after the other, and its memory holds the model of each: a program
/// that was meant to have one GPU a rank would be slow and not know why.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Oversubscription {
    /// More ranks than GPUs are an error.
    #[default]
    Refuse,
    /// Local rank `r` takes GPU `r mod n` of `n`.
    ///
    /// It is also the setting for schedulers that show each rank a GPU of its own, as Slurm's
    /// `--gpus-per-task=1` does: each takes the one that it sees.
    Allow,
}

/// The number of the device, of `devices` of this kind on its host, that the rank takes.
///
/// # Errors
///
/// If there is none, or if there are more ranks than devices and they may not share: on every rank
/// of the host alike, so that none of them waits for another.
pub(crate) fn choose(
    place: &Topology,
    kind: BackendKind,
    devices: usize,
    oversubscription: Oversubscription,
) -> Result<usize> {
    let ranks = place.local_world_size();
    let error = |text: String| Err(Error::new(Kind::Device, text + advice(kind)));
    let Some(shared) = place.local_rank().checked_rem(devices) else {
        return error(format!(
            "this host has {}, and no {} that they can see: check its driver, or choose another device",
            counted(ranks, "rank"),
            noun(kind)
        ));
    };
    if ranks <= devices || oversubscription == Oversubscription::Allow {
        return Ok(shared);
    }
    error(format!(
        "this host has {} and {}: start at most {devices} here, or let ranks share devices \
         (`accel-launch --oversubscribe-gpus`, ACCEL_OVERSUBSCRIBE_GPUS=1 or `oversubscription`)",
        counted(ranks, "rank"),
        counted(devices, noun(kind))
    ))
}

/// The same, and says once on a host where ranks share.
pub(crate) fn take(
    place: &Topology,
    kind: BackendKind,
    devices: usize,
    oversubscription: Oversubscription,
) -> Result<usize> {
    let index = choose(place, kind, devices, oversubscription)?;
    if place.is_local_main()
        && let Some(text) = remark(place.local_world_size(), kind, devices)
    {
        user_message::tell(&text);
    }
    Ok(index)
}

/// Returns the remark that ranks share devices, if they do.
fn remark(ranks: usize, kind: BackendKind, devices: usize) -> Option<String> {
    (ranks > devices).then(|| {
        format!(
            "{} of this host share {}: local rank r takes number r mod {devices}",
            counted(ranks, "rank"),
            counted(devices, noun(kind))
        )
    })
}

/// Returns the name of the devices that are counted.
fn noun(kind: BackendKind) -> &'static str {
    match kind {
        BackendKind::Cuda => "`cuda` device",
        BackendKind::Wgpu => "discrete `wgpu` device",
        BackendKind::Flex | BackendKind::NdArray => "device",
    }
}

/// Returns a hint where to look, for the end of an error.
fn advice(kind: BackendKind) -> &'static str {
    match kind {
        BackendKind::Cuda => {
            "; `accel-launch env` lists the GPUs, and those that CUDA_VISIBLE_DEVICES hides"
        }
        BackendKind::Flex | BackendKind::NdArray | BackendKind::Wgpu => "",
    }
}

/// Returns a count with its noun.
fn counted(count: usize, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        _ => format!("{count} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ranks of a host that is the second of two.
    fn host(ranks: usize) -> impl Iterator<Item = Topology> {
        let of = move |rank| Topology::new(ranks + rank, 2 * ranks)?.with_local(rank, ranks);
        (0..ranks).map(move |rank| of(rank).unwrap())
    }

    fn chosen(ranks: usize, devices: usize, setting: Oversubscription) -> Vec<Result<usize>> {
        host(ranks)
            .map(|place| choose(&place, BackendKind::Cuda, devices, setting))
            .collect()
    }

    #[test]
    fn ranks_take_the_device_of_their_local_rank() {
        for setting in [Oversubscription::Refuse, Oversubscription::Allow] {
            for devices in [3, 8] {
                let chosen: Result<Vec<_>> = chosen(3, devices, setting).into_iter().collect();
                assert_eq!(chosen.unwrap(), [0, 1, 2]);
            }
        }
        assert_eq!(remark(3, BackendKind::Cuda, 3), None);
    }

    #[test]
    fn more_ranks_than_devices_are_an_error_of_every_rank() {
        for result in chosen(3, 2, Oversubscription::Refuse) {
            let error = result.unwrap_err();
            assert!(error.is_device());
            let text = error.to_string();
            for part in ["3 ranks and 2 `cuda` devices", "ACCEL_OVERSUBSCRIBE_GPUS=1"] {
                assert!(text.contains(part), "{text}");
            }
        }
    }

    #[test]
    fn ranks_that_may_share_take_turns_over_the_devices() {
        let chosen: Result<Vec<_>> = chosen(5, 2, Oversubscription::Allow).into_iter().collect();
        assert_eq!(chosen.unwrap(), [0, 1, 0, 1, 0]);
        let text = remark(5, BackendKind::Wgpu, 1).unwrap();
        assert!(
            text.contains("5 ranks of this host share 1 discrete `wgpu` device:"),
            "{text}"
        );
    }

    #[test]
    fn there_is_nothing_to_share_where_there_is_no_device() {
        for setting in [Oversubscription::Refuse, Oversubscription::Allow] {
            for result in chosen(2, 0, setting) {
                let error = result.unwrap_err();
                assert!(error.is_device());
                assert!(error.to_string().contains("no `cuda` device"), "{error}");
            }
        }
    }
}
