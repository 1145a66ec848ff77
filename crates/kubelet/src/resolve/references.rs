//! The objects that a pod refers to. Pure.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{EnvFromSource, EnvVar, Pod, Volume, VolumeDevice, VolumeMount};

/// The config maps and secrets that a pod refers to, in its namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ObjectReferences {
    pub config_maps: BTreeSet<String>,
    pub secrets: BTreeSet<String>,
}

impl ObjectReferences {
    pub(super) fn of(pod: &Pod) -> Self {
        let mut all = Self::default();
        for volume in used_volumes(pod) {
            all.extend_with_volume(volume);
        }
        for container in containers(pod) {
            all.extend_with_container(&container);
        }
        let pull_secrets = pod
            .spec
            .iter()
            .flat_map(|spec| spec.image_pull_secrets.iter().flatten());
        all.secrets
            .extend(pull_secrets.map(|reference| reference.name.clone()));
        // The API server accepts empty names, for old clients.
        all.config_maps.remove("");
        all.secrets.remove("");
        all
    }

    /// The references of one volume.
    pub(super) fn of_volume(volume: &Volume) -> Self {
        let mut all = Self::default();
        all.extend_with_volume(volume);
        all
    }

    fn extend_with_volume(&mut self, volume: &Volume) {
        self.config_maps
            .extend(volume.config_map.as_ref().map(|source| source.name.clone()));
        let secret = volume.secret.as_ref();
        self.secrets
            .extend(secret.and_then(|source| source.secret_name.clone()));
        let projected = volume.projected.as_ref();
        for part in projected
            .iter()
            .flat_map(|source| source.sources.iter().flatten())
        {
            self.config_maps
                .extend(part.config_map.as_ref().map(|source| source.name.clone()));
            self.secrets
                .extend(part.secret.as_ref().map(|source| source.name.clone()));
        }
    }

    fn extend_with_container(&mut self, container: &AnyContainer<'_>) {
        for from in container.env_from {
            self.config_maps.extend(
                from.config_map_ref
                    .as_ref()
                    .map(|source| source.name.clone()),
            );
            self.secrets
                .extend(from.secret_ref.as_ref().map(|source| source.name.clone()));
        }
        for from in container
            .env
            .iter()
            .filter_map(|variable| variable.value_from.as_ref())
        {
            self.config_maps
                .extend(from.config_map_key_ref.as_ref().map(|key| key.name.clone()));
            self.secrets
                .extend(from.secret_key_ref.as_ref().map(|key| key.name.clone()));
        }
    }
}

/// The common fields of all kinds of containers.
pub(super) struct AnyContainer<'a> {
    pub name: &'a str,
    pub env: &'a [EnvVar],
    pub env_from: &'a [EnvFromSource],
    pub mounts: &'a [VolumeMount],
    pub devices: &'a [VolumeDevice],
}

/// The fields have the same names in containers and ephemeral containers, which have no type in common.
macro_rules! any_container {
    ($container:expr) => {
        AnyContainer {
            name: &$container.name,
            env: $container.env.as_deref().unwrap_or_default(),
            env_from: $container.env_from.as_deref().unwrap_or_default(),
            mounts: $container.volume_mounts.as_deref().unwrap_or_default(),
            devices: $container.volume_devices.as_deref().unwrap_or_default(),
        }
    };
}

/// All containers of a pod: init containers, containers, ephemeral containers.
pub(super) fn containers(pod: &Pod) -> impl Iterator<Item = AnyContainer<'_>> {
    pod.spec.iter().flat_map(|spec| {
        let init = spec.init_containers.iter().flatten();
        let ephemeral = spec.ephemeral_containers.iter().flatten();
        init.chain(&spec.containers)
            .map(|container| any_container!(container))
            .chain(ephemeral.map(|container| any_container!(container)))
    })
}

/// The volumes that a container mounts. As in upstream, others are not resolved.
pub(super) fn used_volumes(pod: &Pod) -> impl Iterator<Item = &Volume> {
    let used: BTreeSet<_> = containers(pod)
        .flat_map(|container| {
            let mounts = container.mounts.iter().map(|mount| mount.name.as_str());
            mounts.chain(container.devices.iter().map(|device| device.name.as_str()))
        })
        .collect();
    let volumes = pod
        .spec
        .iter()
        .flat_map(|spec| spec.volumes.iter().flatten());
    volumes.filter(move |volume| used.contains(volume.name.as_str()))
}

/// The mount points of other volumes inside a read-only volume, relative to its root.
pub(super) fn nested_mount_points(pod: &Pod, volume: &str) -> BTreeSet<String> {
    let clean = |path: &str| format!("/{}", volumes::content::clean(path));
    let mut nested = BTreeSet::new();
    for container in containers(pod) {
        let all: BTreeSet<_> = container
            .mounts
            .iter()
            .map(|mount| clean(&mount.mount_path))
            .collect();
        for mount in container.mounts.iter().filter(|mount| mount.name == volume) {
            let base = format!("{}/", clean(&mount.mount_path).trim_end_matches('/'));
            let mut below: Vec<&str> = Vec::new();
            for point in all.iter().filter_map(|point| point.strip_prefix(&base)) {
                // A mount point below another one is part of that mount.
                let is_deeper = below.iter().any(|outer| {
                    point
                        .strip_prefix(outer)
                        .is_some_and(|rest| rest.starts_with('/'))
                });
                if !is_deeper && !point.is_empty() {
                    below.push(point);
                }
            }
            nested.extend(below.into_iter().map(str::to_owned));
        }
    }
    nested
}
