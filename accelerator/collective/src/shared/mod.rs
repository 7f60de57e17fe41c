//! Memory that the ranks of one host share.
#![expect(
    unsafe_code,
    reason = "memory that other ranks write to has no references; see the README of this folder"
)]

mod arena;
mod card;
mod gather;
mod holes;
mod hosts;
mod memory;
mod reduce;
mod signal;
mod steps;
mod world;

pub(crate) use arena::{Arena, CHUNK as STAGE, Region};
pub(crate) use hosts::Hosts;
pub(crate) use signal::{Spin, cores};
pub(crate) use steps::{Scratch, Steps};
pub(crate) use world::World;

#[cfg(test)]
mod tests;
