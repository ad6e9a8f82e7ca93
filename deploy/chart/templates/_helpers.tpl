{{/* A name's first 40 characters, which end as a label must. */}}
{{- define "plait.short" -}}
{{- regexReplaceAll "[-.]+$" (trunc 40 .) "" -}}
{{- end -}}

{{- define "plait.name" -}}
{{- include "plait.short" (default .Chart.Name .Values.nameOverride) -}}
{{- end -}}

{{/* LeaderWorkerSet adds to the name, and pods' names end at 63 characters. */}}
{{- define "plait.fullname" -}}
{{- $name := include "plait.name" . -}}
{{- $both := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- include "plait.short" (default $both .Values.fullnameOverride) -}}
{{- end -}}

{{- define "plait.selector" -}}
app.kubernetes.io/name: {{ include "plait.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "plait.labels" -}}
{{ include "plait.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* GPUs, or ranks on CPUs, of one pod. */}}
{{- define "plait.ranks" -}}
{{- div (mul .Values.parallel.tp .Values.parallel.dp) .Values.parallel.nodes -}}
{{- end -}}

{{/* LeaderWorkerSet makes a headless Service of its set's name, by which the pods find their head; ours is another. */}}
{{- define "plait.setName" -}}
{{ include "plait.fullname" . }}-group
{{- end -}}

{{- define "plait.isGroup" -}}
{{- if gt (int .Values.parallel.nodes) 1 }}true{{ end -}}
{{- end -}}

{{/* A replica takes ranks of several nodes: the leader of a group has the one engine and the HTTP address. */}}
{{- define "plait.spansNodes" -}}
{{- if mod .Values.parallel.dp .Values.parallel.nodes }}true{{ end -}}
{{- end -}}

{{/* Pods that answer HTTP. */}}
{{- define "plait.serverSelector" -}}
{{ include "plait.selector" . }}
{{- if include "plait.spansNodes" . }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end -}}

{{/* As many as there are at all times, but for an upgrade. */}}
{{- define "plait.leastReplicas" -}}
{{- ternary .Values.replicas .Values.autoscaling.minReplicas (eq .Values.autoscaling.kind "none") -}}
{{- end -}}

{{/* Of a quantity: 8Gi, 500M, 1e9, 1024. */}}
{{- define "plait.bytes" -}}
{{- $units := dict "" 1.0 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- $text := toString . -}}
{{- $number := regexFind "^[0-9.]+([eE][+-]?[0-9]+)?" $text -}}
{{- mulf (float64 $number) (get $units (trimPrefix $number $text)) -}}
{{- end -}}

{{/* Of the command line: what --set and YAML read as a number too. */}}
{{- define "plait.word" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{/* MODEL of the command line. */}}
{{- define "plait.model" -}}
{{- if .Values.model.hub -}}
{{ .Values.model.hub }}
{{- else -}}
{{ printf "/models/%s" .Values.model.path | trimSuffix "/" }}
{{- end -}}
{{- end -}}
