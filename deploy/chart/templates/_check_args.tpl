{{/* Flags in args that the chart writes itself, by the value to set instead; --no-FLAG is as FLAG. */}}
{{- define "plait.flagValues" -}}
--tp: parallel.tp
--tensor-parallel-size: parallel.tp
--tp-size: parallel.tp
--dp: parallel.dp
--data-parallel-size: parallel.dp
--dp-size: parallel.dp
--dp-attention: parallel.dpAttention
--enable-dp-attention: parallel.dpAttention
--nnodes: parallel.nodes
--host: ipFamily
--port: service.port
--api-key-file: apiKeys.secret
--served-model-name: model.servedName
--load-timeout-seconds: probes.loadSeconds
--keys: nodeKeys.secret
--head: nodeKeys.port
--meet-timeout-seconds: probes.loadSeconds
--shutdown-delay-seconds: drain.announceSeconds
--restart: restart.policy
--restart-budget: restart.budget
--device: gpu.enabled
--metrics-without-key: monitoring.withoutKey
{{- end -}}

{{/* Beginnings of flags that cannot work in a pod of the chart, and why. */}}
{{- define "plait.flagsOfNoPod" -}}
--uds: the Service and the probes reach a pod by its port
--ssl-: the probes ask by plain HTTP; TLS ends in a gateway or a mesh
--config: its settings would bypass the chart's checks; give flags
--launcher: the pods of a group are numbered by LeaderWorkerSet
--node-rank: the pods of a group are numbered by LeaderWorkerSet
--dry-run: such a pod prints and ends
--stop-with-stdin: a pod has no standard input
--gpus-per-node: the chart gives each pod its GPUs
--group-: plait launch tells the servers of a group
--rank-: plait launch tells the servers of a group
{{- end -}}

{{- define "plait.checkArgs" -}}
{{- $values := include "plait.flagValues" . | fromYaml -}}
{{- $ofNoPod := include "plait.flagsOfNoPod" . | fromYaml -}}
{{- range $word := .Values.args -}}
{{- $flag := include "plait.word" $word | splitList "=" | first -}}
{{- with get $values (regexReplaceAll "^--no-" $flag "--") -}}
{{- $now := $.Values -}}
{{- range splitList "." . -}}{{- $now = get $now . -}}{{- end -}}
{{- fail (printf "args has %s, which the chart sets itself; set %s instead%s" $flag . (ternary "" (printf ", which is %v" $now) (empty $now))) -}}
{{- end -}}
{{- range $begin, $why := $ofNoPod -}}
{{- if hasPrefix $begin $flag -}}{{- fail (printf "args has %s; leave it out: %s" $flag $why) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
