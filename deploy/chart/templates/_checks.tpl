{{/* Values that contradict each other; a message says what was given and what to set. */}}
{{- define "plait.checks" -}}
{{- $v := .Values -}}
{{- $sources := list -}}
{{- range $name := list "hub" "claim" "image" -}}
{{- if index $v.model $name -}}{{- $sources = append $sources (printf "model.%s" $name) -}}{{- end -}}
{{- end -}}
{{- if ne (len $sources) 1 -}}
{{- fail (printf "model needs one of hub, claim, image; given: %s. Set one" (default "none" (join ", " $sources))) -}}
{{- end -}}
{{- if and $v.model.hub $v.model.path -}}
{{- fail (printf "model.path is %q, and model.hub %q has no folders; leave one out" $v.model.path $v.model.hub) -}}
{{- end -}}
{{- if not $v.apiKeys.secret -}}
{{- fail "apiKeys.secret is empty, and a server that others reach needs keys; run `kubectl create secret generic plait-keys --from-file=keys.txt` and set apiKeys.secret: plait-keys" -}}
{{- end -}}
{{- range $word := $v.args -}}
{{- $word = include "plait.word" $word -}}
{{- range $flag, $value := dict "--tp" "parallel.tp" "--tensor-parallel-size" "parallel.tp" "--tp-size" "parallel.tp" "--dp" "parallel.dp" "--data-parallel-size" "parallel.dp" "--dp-size" "parallel.dp" "--dp-attention" "parallel.dpAttention" "--enable-dp-attention" "parallel.dpAttention" "--nnodes" "parallel.nodes" "--port" "service.port" "--host" "nothing: the pods listen on all addresses" "--api-key-file" "apiKeys.secret" "--served-model-name" "model.servedName" "--load-timeout-seconds" "probes.loadSeconds" "--keys" "nodeKeys.secret" "--head" "nodeKeys.port" "--meet-timeout-seconds" "probes.loadSeconds" "--shutdown-delay-seconds" "drain.announceSeconds" "--restart" "restart.policy" "--restart-budget" "restart.budget" "--device" "gpu.enabled" "--metrics-without-key" "monitoring.withoutKey" -}}
{{- if eq (first (splitList "=" $word)) $flag -}}
{{- $now := $v -}}
{{- range $name := splitList "." $value -}}{{- $now = get (default dict $now) $name -}}{{- end -}}
{{- fail (printf "args has %s, which the chart sets itself; set %s instead%s" $flag $value (ternary (printf ", which is %v" $now) "" (not (empty $now)))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $name := include "plait.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the Service would be called %q, and its name has lower-case letters, digits and -, a letter first; set fullnameOverride" $name) -}}
{{- end -}}
{{- range $label, $value := include "plait.selector" . | fromYaml -}}
{{- if hasKey $v.podLabels $label -}}
{{- fail (printf "podLabels has %s, by which the chart finds its pods; leave it out, nameOverride changes the name" $label) -}}
{{- end -}}
{{- end -}}
{{- $ranks := mul $v.parallel.dp $v.parallel.tp -}}
{{- if mod $ranks $v.parallel.nodes -}}
{{- fail (printf "parallel.dp times parallel.tp are %d ranks on %d nodes, and each node takes equally many; set parallel.dp to a multiple of parallel.nodes, or another parallel.tp" (int $ranks) (int $v.parallel.nodes)) -}}
{{- end -}}
{{- if and (include "plait.spansNodes" .) $v.parallel.dpAttention -}}
{{- fail (printf "parallel.dp is %d on %d nodes, and with parallel.dpAttention each node takes equally many whole replicas; set parallel.dp to a multiple of parallel.nodes" (int $v.parallel.dp) (int $v.parallel.nodes)) -}}
{{- end -}}
{{- if and (include "plait.isGroup" .) (not $v.nodeKeys.secret) -}}
{{- fail (printf "parallel.nodes is %d, and nodes need keys of each other; run `plait keys new DIR --nodes %d`, then `kubectl create secret generic plait-node-keys --from-file=DIR`, and set nodeKeys.secret: plait-node-keys" (int $v.parallel.nodes) (int $v.parallel.nodes)) -}}
{{- end -}}
{{- if and $v.parallel.dpAttention (eq (int $v.parallel.dp) 1) -}}
{{- fail "parallel.dpAttention divides the experts among replicas, and parallel.dp is 1; set parallel.dp to 2 or more" -}}
{{- end -}}
{{- if and (ne $v.restart.policy "never") (include "plait.isGroup" .) -}}
{{- fail (printf "restart.policy is %s, and LeaderWorkerSet makes a group of pods anew when one is lost; leave it at never" $v.restart.policy) -}}
{{- end -}}
{{- if and (ne $v.restart.policy "never") $v.parallel.dpAttention -}}
{{- fail (printf "restart.policy is %s, and with parallel.dpAttention one lost rank ends all, so that the pod starts again; leave it at never" $v.restart.policy) -}}
{{- end -}}
{{- $ports := list (int $v.nodeKeys.port) (add1 $v.nodeKeys.port | int) -}}
{{- if and (include "plait.isGroup" .) (has (int $v.service.port) $ports) -}}
{{- fail (printf "service.port is %d, and the launchers and engines of a group use nodeKeys.port, %d, and the port after it; set another" (int $v.service.port) (int $v.nodeKeys.port)) -}}
{{- end -}}
{{- if ge (include "plait.bytes" $v.shm | float64) (include "plait.bytes" $v.resources.memory | float64) -}}
{{- fail (printf "shm is %v, and resources.memory, which it counts within, is %v; set a smaller shm or more memory" $v.shm $v.resources.memory) -}}
{{- end -}}
{{- if and (ne $v.autoscaling.kind "none") (gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas is %d, over autoscaling.maxReplicas, %d; swap them" (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if and $v.inferencePool.enabled (not $v.inferencePool.endpointPicker) -}}
{{- fail "inferencePool.enabled needs inferencePool.endpointPicker, the Service of its endpoint picker" -}}
{{- end -}}
{{- if and $v.inferencePool.enabled (not $v.monitoring.withoutKey) -}}
{{- fail "inferencePool.enabled needs monitoring.withoutKey: true, since an endpoint picker reads /metrics without a key; let networkPolicy.from name who may reach the pods" -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled (not $v.networkPolicy.from) (ne $v.service.type "ClusterIP") -}}
{{- fail (printf "service.type is %s, and the network policy lets in the pods of namespace %s alone; name who may use the API in networkPolicy.from, such as [{ipBlock: {cidr: 10.0.0.0/8}}]" $v.service.type .Release.Namespace) -}}
{{- end -}}
{{- if and $v.monitoring.podMonitor (not $v.monitoring.keySecret) (not $v.monitoring.withoutKey) -}}
{{- fail "monitoring.podMonitor needs monitoring.keySecret, a Secret with one API key, since /metrics needs one; or monitoring.withoutKey: true" -}}
{{- end -}}
{{- $reader := ternary "monitoring.podMonitor is true" (printf "autoscaling.kind is %s" $v.autoscaling.kind) $v.monitoring.podMonitor -}}
{{- $isRead := or $v.monitoring.podMonitor (ne $v.autoscaling.kind "none") -}}
{{- if and $isRead $v.networkPolicy.enabled (not $v.networkPolicy.prometheus) -}}
{{- fail (printf "%s, and the network policy names no Prometheus that may read /metrics; set networkPolicy.prometheus, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}], or [{podSelector: {}}] for one in namespace %s" $reader .Release.Namespace) -}}
{{- end -}}
{{- end -}}
