//! `--dry-run`: the description of a launch that is not started.

use std::ffi::OsString;
use std::process::ExitCode;

use super::program::FoundProgram;
use crate::error::Result;
use crate::gpu::GpuId;
use crate::settings::Settings;
use crate::settings::options::Options;
use crate::settings::rank_env::RankEnv;
use crate::text::{columns, print};
use crate::variables;

/// Prints the program, the ranks and the settings of a launch.
pub(super) fn describe(
    program: &FoundProgram<'_>,
    settings: &Settings,
    options: &Options,
) -> Result<ExitCode> {
    let mut text = String::from("dry run: nothing is built or started\n\n");
    if let Some(build) = program.build() {
        text.push_str(&format!("build:   {}\n", build.command_line()));
    }
    let path = program.path();
    let arguments = program.arguments.iter().map(OsString::as_os_str);
    let words = std::iter::once(path.as_os_str()).chain(arguments);
    let command: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    text.push_str(&format!("command: {}\n\n", command.join(" ")));

    let port = settings.master_port;
    let environment = RankEnv::new(settings, port, None, program.package_dir());
    let variables: Vec<_> = environment
        .ranks()
        .map(|rank| environment.of(rank))
        .collect();
    // The numbers of ranks on other hosts are known when they meet.
    let hosts = options.hosts();
    let is_first = options.node_rank.unwrap_or(0) == 0;
    let gpu = |rank| settings.gpus.of(rank).map(GpuId::to_string);
    let has_gpus = environment.ranks().any(|rank| gpu(rank).is_some());
    let last = if has_gpus { "GPU" } else { "" };
    let mut ranks =
        vec![["rank", "local rank", "world size", "local world size", last].map(str::to_owned)];
    ranks.extend(variables.iter().enumerate().map(|(rank, variables)| {
        let of = |name: &str| {
            let value = variables.iter().find(|(known, _)| *known == name);
            value
                .map(|(_, value)| value.to_string_lossy().into_owned())
                .unwrap_or_default()
        };
        let none_left = if has_gpus { "none" } else { "" };
        let known_later = |name: &str, is_known: bool| match is_known {
            true => of(name),
            false => "known later".to_owned(),
        };
        [
            known_later("RANK", is_first),
            of("LOCAL_RANK"),
            known_later("WORLD_SIZE", hosts == 1),
            of("LOCAL_WORLD_SIZE"),
            gpu(rank).unwrap_or_else(|| none_left.to_owned()),
        ]
    }));
    text.push_str(&columns(&ranks));
    text.push('\n');
    let mut table = vec![["setting", "value", "from"].map(str::to_owned)];
    table.extend(settings.table.iter().map(|setting| {
        [
            setting.name.clone(),
            setting.value.clone(),
            setting.origin.clone(),
        ]
    }));
    let is_shown = |name: &str| settings.table.iter().any(|setting| setting.name == name);
    let inherited = variables::set().into_iter();
    let inherited = inherited.filter(|(name, _)| !is_shown(name));
    table.extend(inherited.map(|(name, value)| {
        let value = value.to_string_lossy().into_owned();
        [name, value, "environment".to_owned()]
    }));
    text.push_str(&columns(&table));
    print(&text)
}
