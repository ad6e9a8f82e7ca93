{{/* Values that contradict each other; a message says what was given and what to set. */}}
{{- define "plait.checks" -}}
{{- include "plait.checkModel" . -}}
{{- include "plait.checkArgs" . -}}
{{- include "plait.checkNames" . -}}
{{- include "plait.checkEnv" . -}}
{{- include "plait.checkParallel" . -}}
{{- include "plait.checkKeys" . -}}
{{- include "plait.checkRestart" . -}}
{{- include "plait.checkResources" . -}}
{{- include "plait.checkVolumes" . -}}
{{- include "plait.checkScaling" . -}}
{{- include "plait.checkNetwork" . -}}
{{- end -}}

{{- define "plait.checkModel" -}}
{{- $model := .Values.model -}}
{{- $sources := list -}}
{{- range $name := list "hub" "claim" "image" -}}
{{- if index $model $name -}}{{- $sources = append $sources (printf "model.%s" $name) -}}{{- end -}}
{{- end -}}
{{- if ne (len $sources) 1 -}}
{{- fail (printf "model needs one of hub, claim, image; given: %s. Set one" (default "none" (join ", " $sources))) -}}
{{- end -}}
{{- if and $model.hub $model.path -}}
{{- fail (printf "model.path is %q, and model.hub %q has no folders; leave one out" $model.path $model.hub) -}}
{{- end -}}
{{- if and $model.hubTokenSecret (not $model.hub) -}}
{{- fail (printf "model.hubTokenSecret is %q, and the model comes from %s, which needs no token; leave it out" $model.hubTokenSecret (first $sources)) -}}
{{- end -}}
{{- if and $model.image (semverCompare "<1.33.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "model.image needs Kubernetes 1.33 or newer, and this is %s; set model.hub or model.claim instead" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}

{{- define "plait.checkKeys" -}}
{{- $v := .Values -}}
{{- if not $v.apiKeys.secret -}}
{{- fail "apiKeys.secret is empty, and a server that others reach needs keys; run `kubectl create secret generic plait-keys --from-file=keys.txt` and set apiKeys.secret: plait-keys" -}}
{{- end -}}
{{- if and (include "plait.isGroup" .) (not $v.nodeKeys.secret) -}}
{{- fail (printf "parallel.nodes is %d, and nodes need keys of each other; run `plait keys new DIR --nodes %d`, then `kubectl create secret generic plait-node-keys --from-file=DIR`, and set nodeKeys.secret: plait-node-keys" (int $v.parallel.nodes) (int $v.parallel.nodes)) -}}
{{- end -}}
{{- if and $v.nodeKeys.secret (not (include "plait.isGroup" .)) -}}
{{- fail (printf "nodeKeys.secret is %q, and parallel.nodes is 1: one node needs no keys of others; leave it out, or set parallel.nodes" $v.nodeKeys.secret) -}}
{{- end -}}
{{- end -}}

{{- define "plait.checkNames" -}}
{{- $v := .Values -}}
{{- $name := include "plait.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the Service would be called %q, and its name has lower-case letters, digits and -, a letter first; set fullnameOverride" $name) -}}
{{- end -}}
{{- range $label, $_ := include "plait.labels" . | fromYaml -}}
{{- range $value, $labels := dict "podLabels" $v.podLabels "monitoring.labels" $v.monitoring.labels -}}
{{- if hasKey $labels $label -}}
{{- fail (printf "%s has %s, which the chart sets itself; leave it out, nameOverride changes the name" $value $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "plait.checkEnv" -}}
{{- $names := list -}}
{{- range .Values.env -}}
{{- if has .name $names -}}
{{- fail (printf "env has %s twice; leave one out" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- if and .Values.model.hubTokenSecret (has "HF_TOKEN" $names) -}}
{{- fail "env has HF_TOKEN, which model.hubTokenSecret sets; leave one out" -}}
{{- end -}}
{{- end -}}

{{- define "plait.checkParallel" -}}
{{- $v := .Values -}}
{{- $ranks := mul $v.parallel.dp $v.parallel.tp -}}
{{- if mod $ranks $v.parallel.nodes -}}
{{- fail (printf "parallel.dp times parallel.tp are %d ranks on %d nodes, and each node takes equally many; set parallel.dp to a multiple of parallel.nodes, or another parallel.tp" (int $ranks) (int $v.parallel.nodes)) -}}
{{- end -}}
{{- if and (include "plait.spansNodes" .) $v.parallel.dpAttention -}}
{{- fail (printf "parallel.dp is %d on %d nodes, and with parallel.dpAttention each node takes equally many whole replicas; set parallel.dp to a multiple of parallel.nodes" (int $v.parallel.dp) (int $v.parallel.nodes)) -}}
{{- end -}}
{{- if and $v.parallel.dpAttention (eq (int $v.parallel.dp) 1) -}}
{{- fail "parallel.dpAttention divides the experts among replicas, and parallel.dp is 1; set parallel.dp to 2 or more" -}}
{{- end -}}
{{- end -}}

{{- define "plait.checkRestart" -}}
{{- $v := .Values -}}
{{- if and (ne $v.restart.policy "never") (include "plait.isGroup" .) -}}
{{- fail (printf "restart.policy is %s, and LeaderWorkerSet makes a group of pods anew when one is lost; leave it at never" $v.restart.policy) -}}
{{- end -}}
{{- if and (ne $v.restart.policy "never") $v.parallel.dpAttention -}}
{{- fail (printf "restart.policy is %s, and with parallel.dpAttention one lost rank ends all, so that the pod starts again; leave it at never" $v.restart.policy) -}}
{{- end -}}
{{- end -}}

{{- define "plait.checkResources" -}}
{{- $v := .Values -}}
{{- $ports := list (int $v.nodeKeys.port) (add1 $v.nodeKeys.port | int) -}}
{{- if and (include "plait.isGroup" .) (has (int $v.service.port) $ports) -}}
{{- fail (printf "service.port is %d, and the launchers and engines of a group use nodeKeys.port, %d, and the port after it; set another" (int $v.service.port) (int $v.nodeKeys.port)) -}}
{{- end -}}
{{- if ge (include "plait.bytes" $v.shm | float64) (include "plait.bytes" $v.resources.memory | float64) -}}
{{- fail (printf "shm is %v, and resources.memory, which it counts within, is %v; set a smaller shm or more memory" $v.shm $v.resources.memory) -}}
{{- end -}}
{{- if eq $v.rdma.resource $v.gpu.resource -}}
{{- fail (printf "rdma.resource and gpu.resource are both %s; set rdma.resource to that of the RDMA device plugin, or leave it out" $v.rdma.resource) -}}
{{- end -}}
{{- end -}}

{{/* Mounts of the chart's own, and those of extraVolumeMounts. */}}
{{- define "plait.checkVolumes" -}}
{{- $names := list -}}
{{- range .Values.extraVolumes -}}
{{- if has .name (concat $names (list "api-keys" "cache" "shm" "tmp" "model" "node-keys" "node-keys-secret")) -}}
{{- fail (printf "extraVolumes has %s, and there is a volume of that name; choose another name" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- $paths := list "/etc/plait" "/cache" "/dev/shm" "/tmp" "/models" "/keys" -}}
{{- range .Values.extraVolumeMounts -}}
{{- if not (has .name $names) -}}
{{- fail (printf "extraVolumeMounts has %s, and extraVolumes has no volume of that name, but: %s" .name (default "none" (join ", " $names))) -}}
{{- end -}}
{{- if has (trimSuffix "/" .mountPath) $paths -}}
{{- fail (printf "extraVolumeMounts has %s twice, or where the chart mounts a volume; choose another mountPath" .mountPath) -}}
{{- end -}}
{{- $paths = append $paths (trimSuffix "/" .mountPath) -}}
{{- end -}}
{{- end -}}

{{- define "plait.checkScaling" -}}
{{- $scaling := .Values.autoscaling -}}
{{- if and (ne $scaling.kind "none") (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas is %d, over autoscaling.maxReplicas, %d; swap them" (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}

{{/* Who reads /metrics and who reaches the pods. */}}
{{- define "plait.checkNetwork" -}}
{{- $v := .Values -}}
{{- if and $v.inferencePool.enabled (not $v.inferencePool.endpointPicker) -}}
{{- fail "inferencePool.enabled needs inferencePool.endpointPicker, the Service of its endpoint picker" -}}
{{- end -}}
{{- if and $v.inferencePool.enabled (not $v.monitoring.withoutKey) -}}
{{- fail "inferencePool.enabled needs monitoring.withoutKey: true, since an endpoint picker reads /metrics without a key; let networkPolicy.from name who may reach the pods" -}}
{{- end -}}
{{- if and $v.monitoring.podMonitor (not $v.monitoring.keySecret) (not $v.monitoring.withoutKey) -}}
{{- fail "monitoring.podMonitor needs monitoring.keySecret, a Secret with one API key, since /metrics needs one; or monitoring.withoutKey: true" -}}
{{- end -}}
{{- if $v.networkPolicy.enabled -}}
{{- if and (not $v.networkPolicy.from) (ne $v.service.type "ClusterIP") -}}
{{- fail (printf "service.type is %s, and the network policy lets in the pods of namespace %s alone; name who may use the API in networkPolicy.from, such as [{ipBlock: {cidr: 10.0.0.0/8}}]" $v.service.type .Release.Namespace) -}}
{{- end -}}
{{- $reader := ternary "monitoring.podMonitor is true" (printf "autoscaling.kind is %s" $v.autoscaling.kind) $v.monitoring.podMonitor -}}
{{- $isRead := or $v.monitoring.podMonitor (ne $v.autoscaling.kind "none") -}}
{{- if and $isRead (not $v.networkPolicy.prometheus) -}}
{{- fail (printf "%s, and networkPolicy.prometheus names nobody who may read /metrics (networkPolicy.from is for clients); set it, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}], or [{podSelector: {}}] for one in namespace %s" $reader .Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}
